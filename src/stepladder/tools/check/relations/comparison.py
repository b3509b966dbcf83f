"""The comparison of runs with frozen weights: violated relations as findings, and what holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepladder.core.numbers import format_count
from stepladder.tools.check.relations import gradients, shown
from stepladder.tools.check.relations.frozen_runs import FrozenRuns, FrozenScript
from stepladder.tools.check.relations.samples_read import are_of_one_data_set
from stepladder.tools.check.relations.violation import Violation
from stepladder.tools.check.rules.evidence import CHECK_TEXTS, RunEvidence
from stepladder.tools.findings.finding import Finding


@dataclass(frozen=True)
class ComparisonWithOne:
    """What a comparison with one process has shown.

    Args:
        findings: The violated relations, the most certain first.
        held: What held, a line for each relation.
    """

    findings: list[Finding] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


def compare_with_one_process(script: FrozenScript, evidence: RunEvidence) -> ComparisonWithOne:
    """Compare all ranks with one process.

    Raises:
        NotComparable: The script does not train with frozen weights.
    """
    runs = script.compare()
    violations = violations_of(runs)
    if violations:
        runs = script.measure_noise(runs)
        violations = violations_of(runs)
    held = []
    if not are_of_one_data_set(runs):
        held.append("not compared with one process: a rank reads data that one process does not")
    kinds = {violation.relation for violation in violations}
    if "gradients" not in kinds and (count := gradients.count_compared(runs)):
        held.append(
            f"gradients: with the same weights, the mean of {format_count(count, 'step')} is that "
            "of one process"
        )
    if "shown-numbers" not in kinds and (count := shown.count_compared(runs)):
        held.append(
            f"numbers: with the same weights, {format_count(count, 'line')} as on one process"
        )
    return ComparisonWithOne([finding_of(one, runs, evidence) for one in violations], held)


def violations_of(runs: FrozenRuns) -> list[Violation]:
    """Return the violated relations, the most certain first."""
    violations = [*gradients.violations(runs), *shown.violations(runs)]
    return sorted(violations, key=lambda violation: -violation.certainty)


def finding_of(violation: Violation, runs: FrozenRuns, evidence: RunEvidence) -> Finding:
    # Its lines are those of the copy in which it ran.
    in_copy = RunEvidence(runs.compared, evidence.source)
    location = in_copy.location(violation.line)
    return CHECK_TEXTS.finding(violation.relation, location, violation.evidence)
