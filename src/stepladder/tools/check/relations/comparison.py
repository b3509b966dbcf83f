"""The comparison of runs with frozen weights: violated relations as findings, and what holds."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files

from stepladder.core.numbers import format_count
from stepladder.tools.check import relations
from stepladder.tools.check.relations import gradients, rates, samples_read, shown
from stepladder.tools.check.relations.facts import facts_of
from stepladder.tools.check.relations.frozen_runs import FrozenRuns, FrozenScript, Violation
from stepladder.tools.check.rules.all_rules import names_of
from stepladder.tools.check.rules.evidence import CHECK_TEXTS, Comparison, RunEvidence
from stepladder.tools.check.rules.process import shared_gpus
from stepladder.tools.check.rules.samples import same_samples
from stepladder.tools.findings.finding import Finding, Severity

TABLE = files(relations).joinpath("explanations.toml").read_text(encoding="utf-8")


@dataclass(frozen=True)
class LikelyCause:
    """A likely cause of a violated relation.

    Args:
        rule: The rule that has its texts.
        when: The facts that must all be true.
        severity: A severity other than that of the rule.
    """

    rule: str
    when: tuple[str, ...]
    severity: Severity | None = None


EXPLANATIONS = [LikelyCause(**row) for row in tomllib.loads(TABLE)["explanation"]]
CHECK_TEXTS.validate(explanation.rule for explanation in EXPLANATIONS)


@dataclass(frozen=True)
class Relation:
    """What must be the same with frozen weights on one process and on several.

    Args:
        name: Its name, which is that of its texts.
        violations: Yields where it does not hold.
        count: Returns how much was compared.
        unit: What is counted.
        holds: What is said where it holds.
        partial_causes: Of the rules that explain it, those that do so for some lines alone: it is
            compared beside them, and what has a cause of its own is shown.
    """

    name: str
    violations: Callable[[FrozenRuns], Iterator[Violation]]
    count: Callable[[FrozenRuns], int]
    unit: str
    holds: str
    partial_causes: frozenset[str] = frozenset()


RELATIONS = (
    Relation(
        "gradients",
        gradients.violations,
        gradients.count_compared,
        "step",
        "gradients: with the same weights, the mean of {} is that of {}",
    ),
    Relation(
        "learning-rate",
        rates.violations,
        rates.count_compared,
        "optimizer",
        "learning rate: after the same samples, that of {} is as on {}",
    ),
    Relation(
        "shown-numbers",
        shown.violations,
        shown.count_compared,
        "line",
        "numbers: with the same weights, {} as on {}",
        frozenset({"padded-evaluation", "mean-of-means warning"}),
    ),
)


def causes_of(findings: Iterable[Finding]) -> dict[str, str]:
    """Return the rule whose finding explains a violation of a relation, by its name."""
    return {
        relation.name: rule
        for relation in RELATIONS
        for rule in names_of(findings)
        if rule in {*CHECK_TEXTS.texts[relation.name].explained_by} - relation.partial_causes
    }


def describe_not_compared(causes: dict[str, str]) -> list[str]:
    return [
        f"{relation.holds.partition(':')[0]}: not compared, since {cause.split()[0]} explains it"
        for relation in RELATIONS
        if (cause := causes.get(relation.name))
    ]


def compare_with_one_process(
    script: FrozenScript, evidence: RunEvidence, causes: dict[str, str]
) -> Comparison:
    """Compare all ranks with one process.

    Args:
        script: The script.
        evidence: What it did on all ranks.
        causes: The relations that are not compared, as of `causes_of`.

    Raises:
        NotComparable: The script does not train with frozen weights.
    """
    relations = [relation for relation in RELATIONS if relation.name not in causes]
    runs, violations = compare_runs(script, relations)
    held = describe_not_compared(causes)
    if len(runs.reference.ranks) > 1:
        more, fewer = len(runs.compared.ranks), len(runs.reference.ranks)
        held.append(f"the script needs several processes: {more} are compared with {fewer}")
    compared = RunEvidence(runs.compared, evidence.source)
    if any(same_samples(compared)):
        held.append("not compared with one process: ranks read the same samples")
        return Comparison(held=held)
    if not samples_read.are_of_one_data_set(runs):
        held.append("not compared with one process: a rank reads data that one process does not")
    kinds = {violation.relation for violation in violations}
    for relation in relations:
        if relation.name not in kinds and (count := relation.count(runs)):
            held.append(relation.holds.format(format_count(count, relation.unit), runs.base))
    findings = [finding_of(violation, runs, evidence) for violation in violations]
    findings += shared_gpus(compared)
    return Comparison(findings, held=held)


def compare_runs(
    script: FrozenScript, relations: list[Relation]
) -> tuple[FrozenRuns, list[Violation]]:
    """Return the runs on one process and on all ranks, and what is violated beyond the noise."""
    runs = script.compare()
    if violations_of(runs, relations):
        runs = script.measure_noise(runs)
    return runs, violations_of(runs, relations)


def violations_of(runs: FrozenRuns, relations: list[Relation]) -> list[Violation]:
    """Return the violations of the first relation that has some, the most certain first.

    Of other samples all that follows is other than on one process.
    """
    samples = list(samples_read.violations(runs))
    violations = samples or [one for relation in relations for one in relation.violations(runs)]
    return sorted(violations, key=lambda violation: -violation.certainty)


def finding_of(violation: Violation, runs: FrozenRuns, evidence: RunEvidence) -> Finding:
    """Return the finding of a violation, by the first explanation whose facts are all true."""
    # Its lines are those of the copy in which it ran.
    location = RunEvidence(runs.compared, evidence.source).location(violation.line)
    facts = {violation.relation, *facts_of(violation, runs, evidence)}
    fitting = (each for each in EXPLANATIONS if facts.issuperset(each.when))
    explanation = next(fitting, LikelyCause(violation.relation, ()))
    return CHECK_TEXTS.finding(explanation.rule, location, violation.evidence, explanation.severity)
