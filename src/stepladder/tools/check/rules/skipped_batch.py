"""Batches that one rank leaves out, while the others make a step with theirs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stepladder.tools.check.events import Backward, Batch, JoinContext
from stepladder.tools.check.recording import LoaderPass
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule
from stepladder.tools.check.rules.hangs import innermost_loop
from stepladder.tools.check.rules.skipped_collective import (
    always_averages,
    conditions_before,
    frames_of,
    source_frames_of,
)
from stepladder.tools.findings.finding import Finding
from stepladder.tools.probe.events import CodeLine


@rank_rule("uneven-steps.skipped")
def skipped_batch(evidence: RunEvidence) -> Findings:
    """Find the first batch that one of two ranks has left out, and the other has trained on."""
    if finding := find_skipped_batch(evidence):
        yield finding


def find_skipped_batch(evidence: RunEvidence) -> Finding | None:
    logs = evidence.run.ranks[:2]
    if len(logs) < 2 or evidence.run.select(JoinContext) or not all(map(always_averages, logs)):
        return None
    for passes in align(log.training_passes for log in logs):
        trained = [[*find_trained(evidence, one_pass)] for one_pass in passes]
        for number, backwards in enumerate(zip(*trained, strict=False), start=1):
            backward = backwards[0] or backwards[1]
            if backward is None or all(backwards):
                continue
            rank = backwards.index(None)
            line, condition = find_condition(evidence, backward)
            return evidence.finding(
                "uneven-steps.skipped",
                line,
                f"rank {rank} makes no backward pass for batch {number} of pass "
                f"{passes[rank].number}, and rank {1 - rank} makes one{condition}",
                rank,
            )
    return None


def find_trained(evidence: RunEvidence, one_pass: LoaderPass) -> Iterator[Backward | None]:
    """Yield for each batch before the last one the backward pass that has followed it, if any.

    A backward pass outside of the loop over the loader may be of any batch: a thread that reads
    ahead has recorded the batches then.
    """
    loop = innermost_loop(evidence, one_pass.line) or range(0)
    batch: Batch | None = None
    backward: Backward | None = None
    for event in one_pass.events:
        if isinstance(event, Backward):
            backward = event
            is_in_loop = any(line in loop for _, line in frames_of(event))
            if not is_in_loop:
                return
        elif isinstance(event, Batch) and event.number == one_pass.number:
            if batch:
                yield backward
            batch, backward = event, None


def find_condition(evidence: RunEvidence, backward: Backward) -> tuple[CodeLine | None, str]:
    """Return the last `if` that decides whether a rank comes to a backward pass, with its line."""
    for file, function, line in source_frames_of(evidence, backward):
        loop = innermost_loop(evidence, CodeLine(file.name, line, function))
        for node in conditions_before(file, function, line, loop.start if loop else 0):
            at = CodeLine(file.name, node.lineno, function)
            return at, f": `if {ast.unparse(node.test)}`"
        if loop:
            break
    return backward.at, ""
