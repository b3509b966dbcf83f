"""The rule for ranks that make different numbers of steps, and what their collectives tell."""

from __future__ import annotations

import ast

from stepladder.tools.check.events import (
    Backward,
    JoinContext,
    OptimizerStep,
    PassStart,
    Returned,
    ScriptCollective,
)
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, rank_rule
from stepladder.tools.check.rules.hangs import has_left_loop_of, innermost_loop
from stepladder.tools.check.rules.rank_values import RANK, chooses_ranks
from stepladder.tools.check.rules.skipped_batch import find_skipped_batch
from stepladder.tools.check.rules.skipped_collective import (
    find_skipped,
    is_called_in_lines,
    source_frames_of,
)
from stepladder.tools.check.script_source import find_nodes, lines_of
from stepladder.tools.probe.events import CodeLine


@rank_rule("uneven-steps")
def uneven_steps(evidence: RunEvidence) -> Findings:
    """Find passes with more batches on one rank than on another."""
    if has_another_cause(evidence):
        return
    logs = evidence.ranks
    for number in range(max(len(log.training_passes) for log in logs)):
        present = [log.training_passes[number] for log in logs if number < len(log.training_passes)]
        is_cut = any(one_pass.end is not None and one_pass.end.cut for one_pass in present)
        if len(present) < 2 or is_cut:
            continue
        counts = [len(one_pass.batches) for one_pass in present]
        complete_counts = [len(p.batches) for p in present if p.is_complete]
        if complete_counts and max(counts) > min(complete_counts):
            text = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
            yield evidence.finding(
                "uneven-steps", present[0].line, f"batches in pass {present[0].number}: {text}"
            )
            return


@rank_rule("uneven-steps")
def uneven_end(evidence: RunEvidence) -> Findings:
    """Find a rank that has left the training loop while the other is still in it.

    Only in a run that stands still, or breaks off.
    """
    if not stands_still(evidence) or has_another_cause(evidence):
        return
    logs = evidence.first_ranks
    backwards = [len(log.select(Backward)) for log in logs]
    passes = [len(log.training_passes) for log in logs]
    if backwards[0] == backwards[1] or min(backwards) == 0 or min(passes) == 0:
        return
    fewer = 0 if backwards[0] < backwards[1] else 1
    last_pass = logs[fewer].training_passes[-1]
    # That rank is done with the pass, and does something else before the next one.
    if passes[0] != passes[1] and last_pass.end is not None:
        return
    if is_at_collective_of_one_rank(evidence, logs[fewer]):
        return
    has_left = has_left_pass(evidence, logs[fewer], last_pass)
    if has_left is None:
        has_left = has_left_loop_of(evidence, fewer, 1 - fewer)
    if has_left or (has_left is None and logs[fewer].has_ended):
        steps = len(logs[fewer].select(OptimizerStep))
        yield evidence.finding(
            "uneven-steps",
            last_pass.line,
            f"rank {fewer} has left the loop after {steps} steps, and rank {1 - fewer} is in its "
            f"step {backwards[1 - fewer]}",
            fewer,
        )


@rank_rule("uneven-steps")
def uneven_backward(evidence: RunEvidence) -> Findings:
    """Compare the number of backward passes, for loops without a loader.

    Those at lines of one rank alone are of a model that it trains for itself.
    """
    if has_another_cause(evidence):
        return
    run = evidence.run
    if any(log.training_passes for log in run.ranks):
        return
    is_at_end = (run.has_finished or stands_still(evidence)) and not run.was_cut_short
    backwards = [log.select(Backward) for log in run.ranks[:2]]
    lines = set.intersection(*({event.at for event in events} for events in backwards))
    backwards = [[event for event in events if event.at in lines] for events in backwards]
    counts = [len(events) for events in backwards]
    if is_at_end and counts[0] != counts[1] and min(counts) > 1:
        more = 0 if counts[0] > counts[1] else 1
        fewer = 1 - more
        last = backwards[fewer][-1]
        has_left = has_left_loop_around(evidence, run.ranks[fewer], last.n, last.at)
        if has_left is None:
            has_left = has_left_loop_of(evidence, fewer, more)
        if has_left is False:
            return
        yield evidence.finding(
            "uneven-steps",
            backwards[more][-1].at,
            f"rank 0 makes {counts[0]} backward passes and rank 1 {counts[1]}",
            more,
        )


def has_another_cause(evidence: RunEvidence) -> bool:
    """Return whether the ranks may differ in their steps, or do so for a reason of its own.

    After a collective or a batch that one rank has skipped, batches are those of different steps.
    """
    if evidence.run.select(JoinContext):
        return True
    return find_skipped(evidence) is not None or find_skipped_batch(evidence) is not None


def stands_still(evidence: RunEvidence) -> bool:
    """Return whether ranks could not go on because of each other."""
    return evidence.run.has_stalled and not evidence.run.has_raised


def is_at_collective_of_one_rank(evidence: RunEvidence, log: RankLog) -> bool:
    """Return whether the last collective of a rank is one that only some ranks call."""
    collectives = log.select(ScriptCollective)
    return any(test_of_rank(evidence, event) for event in collectives[-1:])


def test_of_rank(evidence: RunEvidence, event: PassStart | ScriptCollective) -> str:
    """Return the `if` of the source that lets only some ranks come to an event, if any."""
    for file, _, line in source_frames_of(evidence, event):
        for node in find_nodes(file.tree, ast.If):
            if line in lines_of(node) and chooses_ranks(node.test, RANK, evidence.source):
                return ast.unparse(node.test)
    return ""


def has_left_pass(evidence: RunEvidence, log: RankLog, last_pass: LoaderPass) -> bool | None:
    """Return whether a rank has left the loop over a pass, as far as its collectives tell."""
    line = last_pass.line
    loop = innermost_loop(evidence, line)
    is_of_pass = line is not None and loop is not None and loop.start == line.line
    return has_left_loop_around(evidence, log, last_pass.start.n, line) if is_of_pass else None


def has_left_loop_around(
    evidence: RunEvidence, log: RankLog, after: int, line: CodeLine | None
) -> bool | None:
    """Return whether a rank has left the loop around a line, as far as its collectives tell."""
    loop = innermost_loop(evidence, line)
    return has_left_lines(log, after, line.function, loop) if line and loop else None


def has_left_lines(log: RankLog, after: int, function: str, lines: range) -> bool | None:
    """Return whether a rank has left a loop, as far as its last collective tells.

    What it has recorded does not depend on the moment at which ranks are inspected.

    Args:
        log: The events of the rank.
        after: The number of an event within the loop.
        function: The function that has the loop.
        lines: The lines of the loop.

    Returns:
        None where it has called no collective since, or one within the loop that has returned.
    """
    collectives = [event for event in log.select(ScriptCollective) if event.n > after]
    if not collectives:
        return None
    last = collectives[-1]
    if not is_called_in_lines(last, function, lines):
        return True
    if any(event.n > last.n for event in log.select(Returned)):
        return None
    return False
