"""Rules for collectives, for the process group itself, and for scripts that need CUDA."""

from __future__ import annotations

import ast
import re
from itertools import zip_longest

from stepladder.launcher.diagnose.rank_status import ProcessState
from stepladder.tools.check.events import (
    Backward,
    EnoughPasses,
    GroupInit,
    JoinContext,
    OptimizerStep,
    ProcessExit,
    ScriptCollective,
)
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.check.rules.hangs import has_left_loop_of
from stepladder.tools.check.script_source import find_nodes

HAS_A_CPU_PATH = (
    "is_available",
    '"gloo"',
    "'gloo'",
    "--device",
    "--backend",
    "is_nccl_available",
    "accelerator",
)
CHOOSES_ONE_RANK = re.compile(r"rank(\(\))? == 0|not \w*rank\b|is_main|is_master")


@run_rule("uneven-steps")
def uneven_steps(evidence: RunEvidence) -> Findings:
    """Find passes with more batches on one rank than on another."""
    if not evidence.has_several_ranks or evidence.run.select(JoinContext):
        return
    logs = evidence.run.ranks
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
                "uneven-steps",
                present[0].line,
                f"batches in pass {present[0].number}: {text}",
            )
            return


@run_rule("collective-order")
def collective_order(evidence: RunEvidence) -> Findings:
    """Compare the collectives of two ranks call by call, as far as both ranks have come.

    At the end, also find a rank that waits for the other.
    """
    if not evidence.has_several_ranks:
        return
    first_calls, second_calls = (
        [event for event in log.select(ScriptCollective) if not event.group]
        for log in evidence.run.ranks[:2]
    )
    for number, (first, second) in enumerate(
        zip_longest(
            first_calls,
            second_calls,
        ),
        1,
    ):
        if first is None:
            yield from unanswered_collective(
                evidence,
                1,
                second,
                number,
            )
            return
        if second is None:
            yield from unanswered_collective(
                evidence,
                0,
                first,
                number,
            )
            return
        if first.op != second.op or have_different_shapes(
            first,
            second,
        ):
            yield evidence.finding(
                "collective-order",
                first.at,
                f"collective {number} is {describe_collective(evidence, first)} on rank 0 and "
                f"{describe_collective(evidence, second)} on rank 1",
                0,
            )
            return
    if evidence.run.has_stalled and not evidence.run.deadlock:  # whose own finding says more
        yield from unanswered_backward(evidence)


def have_different_shapes(first: ScriptCollective, second: ScriptCollective) -> bool:
    """Return whether shapes differ in a collective that needs equal ones."""
    allows_any_shape = "gather" in first.op or first.op == "broadcast_object_list"
    return first.shape != second.shape and not allows_any_shape


def describe_collective(evidence: RunEvidence, event: ScriptCollective) -> str:
    shape = f" of shape {event.shape}" if event.shape is not None else ""
    return f"{event.op}{shape} at {evidence.location(event.at)}"


def unanswered_collective(
    evidence: RunEvidence,
    rank: int,
    event: ScriptCollective,
    number: int,
) -> Findings:
    """Find a rank that waits in a collective which the other rank does not reach."""
    peer = 1 - rank
    peer_log = evidence.run.ranks[peer]
    peer_ended_by_itself = peer_log.has_ended and not peer_log.select(EnoughPasses)
    if not evidence.run.has_stalled and not peer_ended_by_itself:
        return
    if list(uneven_end(evidence)):  # which has its own finding
        return
    test = test_of_rank(
        evidence,
        event,
    )
    where = f", under `if {test}`" if test else ""
    yield evidence.finding(
        "collective-order",
        event.at,
        f"rank {rank} waits in {event.op} (its collective {number}{where}), and rank {peer} has "
        f"not come: {describe_last_event(evidence, peer_log)}",
        rank,
    )


def describe_last_event(evidence: RunEvidence, log: RankLog) -> str:
    statuses = evidence.run.deadlock.ranks if evidence.run.deadlock else ()
    status = next((status for status in statuses if status.rank == log.rank), None)
    # A rank that waits when no rank can go on is ended by us, and may write that down. One without
    # a stack was ending by itself.
    was_waiting = status is not None and status.state is ProcessState.RUNNING and bool(status.stack)
    if log.has_ended and not was_waiting:
        return "it has ended"
    collectives = log.select(ScriptCollective)
    if collectives and collectives[-1].group:
        return f"it is in {describe_collective(evidence, collectives[-1])}, of another group"
    if status is not None:
        return f"it is {status.describe_position()}"
    events = [event for event in log.events if event.at]
    if not events:
        return "it has done nothing"
    last = events[-1]
    return f"it was last seen at {evidence.location(last.at)} ({last.kind})"


@run_rule("uneven-steps")
def uneven_end(evidence: RunEvidence) -> Findings:
    """Find a rank that has left the training loop while the other is still in it.

    Only in a run that stands still, or breaks off.
    """
    is_stalled = evidence.run.has_stalled and not evidence.run.select(JoinContext)
    if not evidence.has_several_ranks or not is_stalled:
        return
    logs = evidence.run.ranks[:2]
    backwards = [len(log.select(Backward)) for log in logs]
    passes = [len(log.training_passes) for log in logs]
    if backwards[0] == backwards[1] or min(backwards) == 0 or min(passes) == 0:
        return
    fewer = 0 if backwards[0] < backwards[1] else 1
    last_pass = logs[fewer].training_passes[-1]
    # That rank is done with the pass, and does something else before the next one.
    if passes[0] != passes[1] and last_pass.end is not None:
        return
    if is_at_collective_of_one_rank(
        evidence,
        logs[fewer],
    ):
        return
    if evidence.run.deadlock:
        has_left = has_left_loop_of(
            evidence,
            fewer,
            1 - fewer,
        )
    else:
        has_left = logs[fewer].has_ended or has_left_loop(
            evidence,
            logs[fewer],
            last_pass,
        )
    if has_left:
        steps = len(logs[fewer].select(OptimizerStep))
        yield evidence.finding(
            "uneven-steps",
            last_pass.line,
            f"rank {fewer} has left the loop after {steps} steps, and rank {1 - fewer} is in its "
            f"step {backwards[1 - fewer]}",
            fewer,
        )


def is_at_collective_of_one_rank(evidence: RunEvidence, log: RankLog) -> bool:
    """Return whether the last collective of a rank is one that only some ranks call."""
    collectives = log.select(ScriptCollective)
    return bool(collectives) and bool(
        test_of_rank(
            evidence,
            collectives[-1],
        )
    )


def test_of_rank(evidence: RunEvidence, event: ScriptCollective) -> str:
    """Return the `if` of the source that lets only some ranks come to a collective, if any."""
    calls = {frame for frame in event.way.split(" < ") if frame}
    for file in evidence.source.files:
        for node in find_nodes(
            file.tree,
            ast.If,
        ):
            test = ast.unparse(node.test)
            function = getattr(
                file.enclosing_function(node),
                "name",
                "<module>",
            )
            lines = range(node.body[0].lineno, (node.body[-1].end_lineno or node.lineno) + 1)
            is_around = any(f"{function}:{line}" in calls for line in lines)
            if is_around and CHOOSES_ONE_RANK.search(test.lower()):
                return test
    return ""


def has_left_loop(
    evidence: RunEvidence,
    log: RankLog,
    last_pass: LoaderPass,
) -> bool:
    """Return whether the last collective of a rank is outside of the loop over a pass."""
    collectives = [e for e in log.select(ScriptCollective) if e.n > last_pass.start.n]
    loop = find_loop(
        evidence,
        last_pass,
    )
    if not collectives or loop is None:
        return False
    first_line, last_line = loop
    function_of_loop = last_pass.line.function if last_pass.line else ""
    for frame in collectives[-1].way.split(" < "):
        function, _, line = frame.rpartition(":")
        if frame and function == function_of_loop and first_line <= int(line) <= last_line:
            return False
    return True


def find_loop(evidence: RunEvidence, one_pass: LoaderPass) -> tuple[int, int] | None:
    """Return the first and the last line of the loop over a pass, if the source has it."""
    if not one_pass.line:
        return None
    file = evidence.source.file(evidence.location(one_pass.line).file)
    if file is None:
        return None
    for node in ast.walk(file.tree):
        if isinstance(node, ast.For) and node.lineno == one_pass.line.line:
            return node.lineno, node.end_lineno or node.lineno
    return None


def unanswered_backward(evidence: RunEvidence) -> Findings:
    """Find a rank in a backward pass, with the wrapper's collectives, that the other lacks."""
    backwards = [log.select(Backward) for log in evidence.run.ranks[:2]]
    counts = [len(events) for events in backwards]
    if counts[0] == counts[1]:
        return
    waiting = 0 if counts[0] > counts[1] else 1
    peer = 1 - waiting
    event = backwards[waiting][counts[peer]]
    yield evidence.finding(
        "collective-order",
        event.at,
        f"rank {waiting} waits in backward pass {counts[peer] + 1}, and rank {peer} makes "
        f"{counts[peer]}",
        waiting,
    )


@run_rule("uneven-steps")
def uneven_backward(evidence: RunEvidence) -> Findings:
    """Compare the number of backward passes, for loops without a loader."""
    run = evidence.run
    if not evidence.has_several_ranks or run.select(JoinContext):
        return
    if any(log.training_passes for log in run.ranks):
        return
    is_at_end = (run.has_finished or run.has_stalled) and not run.was_cut_short
    backwards = [log.select(Backward) for log in run.ranks[:2]]
    counts = [len(events) for events in backwards]
    if is_at_end and counts[0] != counts[1] and min(counts) > 1:
        more = 0 if counts[0] > counts[1] else 1
        if run.deadlock and not has_left_loop_of(
            evidence,
            1 - more,
            more,
        ):
            return
        yield evidence.finding(
            "uneven-steps",
            backwards[more][-1].at,
            f"rank 0 makes {counts[0]} backward passes and rank 1 {counts[1]}",
            more,
        )


@run_rule("no-destroy")
def no_destroy(evidence: RunEvidence) -> Findings:
    """Find a process group that the script makes and never destroys."""
    run = evidence.run
    made = [event for _, event in run.select(GroupInit) if event.direct]
    if not made or evidence.source.contains("destroy_process_group"):
        return
    if run.was_cut_short or run.has_stalled or not run.has_finished:
        text = "and no file of the script calls destroy_process_group"
    else:
        ranks_with_group = [rank for rank, event in run.select(ProcessExit) if event.group]
        if not ranks_with_group:
            return
        text = f"and is still there when {len(ranks_with_group)} ranks end"
    yield evidence.finding(
        "no-destroy", made[0].at, f"the group is made on {len(made)} ranks, {text}"
    )


@run_rule("cuda-only")
def cuda_only(evidence: RunEvidence) -> Findings:
    """Find a process group on NCCL in a script that cannot run without a GPU."""
    if evidence.source.contains(*HAS_A_CPU_PATH):
        return
    for rank, event in evidence.run.select(GroupInit):
        if "nccl" in event.backend and event.direct:
            yield evidence.finding(
                "cuda-only",
                event.at,
                f"the backend is {event.backend}, and the script never asks whether there is a GPU",
                rank,
            )
            return
