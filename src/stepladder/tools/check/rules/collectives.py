"""Rules for collectives, for the process group itself, and for scripts that need CUDA."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from stepladder.launcher.diagnose.rank_status import ProcessState
from stepladder.tools.check.events import (
    Backward,
    EnoughPasses,
    Forward,
    GpuQuery,
    GroupInit,
    ProcessExit,
    ScriptCollective,
    WrapperBuilt,
)
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, rank_rule, run_rule
from stepladder.tools.check.rules.skipped_collective import DDP, find_skipped
from stepladder.tools.check.rules.uneven_steps import stands_still, test_of_rank, uneven_end


@rank_rule("no-gradient.gathered")
def gathered_constants(evidence: RunEvidence) -> Findings:
    """Find features that are gathered, and of which a loss has even its own rank's as constants."""
    backwards = evidence.rank_0.select(Backward)
    lines = [event.gathered for event in backwards if event.gathered]
    if lines:
        yield evidence.finding(
            "no-gradient.gathered",
            lines[0],
            f"in {len(lines)} of {len(backwards)} backward passes the loss has this rank's own "
            "features among the gathered ones, as constants",
        )


@rank_rule("collective-order.skipped")
def skipped_collective(evidence: RunEvidence) -> Findings:
    """Find a collective in a training loop that one rank skips while it goes on with DDP."""
    skipped = find_skipped(evidence)
    if skipped:
        where = f": {skipped.condition}" if skipped.condition else ""
        yield evidence.finding(
            "collective-order.skipped",
            skipped.event.at,
            f"rank {skipped.rank} comes to {describe_collective(evidence, skipped.event)}, and "
            f"rank {1 - skipped.rank} goes on with the next backward pass, whose collectives are "
            f"DDP's{where}",
            1 - skipped.rank,
        )


@rank_rule("collective-order.buffers")
def lone_evaluation(evidence: RunEvidence) -> Findings:
    """Find a wrapped model that one rank alone evaluates, in a run that came no further.

    DDP broadcasts buffers before the first call after a training step. The other ranks take them
    for their next collective, or have ended.
    """
    run = evidence.run
    broadcasts = any(event.buffers for _, event in run.select(WrapperBuilt))
    calls = [(rank, call) for rank, call in run.select(Forward) if call.wrapped == DDP]
    if run.has_finished or not broadcasts or not any(call.norms for _, call in calls):
        return
    for log in evidence.ranks:
        for one_pass in log.evaluation_passes:
            first = one_pass.evaluated_calls[0]
            test = test_of_rank(evidence, one_pass.start)
            ranks_there = {rank for rank, call in calls if call.at == first.at}
            later = [event for event in log.select(Backward) if event.n > first.n]
            if test and ranks_there == {log.rank} and len(later) <= 1:  # in which it may wait
                yield evidence.finding(
                    "collective-order.buffers",
                    first.at,
                    f"rank {log.rank} alone calls the wrapped model, under `if {test}`, and its "
                    "wrapper broadcasts the buffers of batch norm",
                    log.rank,
                )
                return


@rank_rule("collective-order", "collective-order.sizes")
def collective_order(evidence: RunEvidence) -> Findings:
    """Compare the collectives of two ranks call by call, as far as both ranks have come.

    At the end, also find a rank that waits for the other.
    """
    if find_skipped(evidence):
        return
    calls = [
        [event for event in log.select(ScriptCollective) if not event.group]
        for log in evidence.first_ranks
    ]
    for number, (first, second) in enumerate(zip_longest(*calls), 1):
        if first is None or second is None:
            rank = 0 if second is None else 1
            yield from unanswered_collective(evidence, rank, first or second, number)
            return
        is_last = not evidence.run.has_finished and number == min(map(len, calls))
        if first.op != second.op or have_different_shapes(first, second, is_last):
            is_one_call = first.op == second.op and first.at == second.at
            yield evidence.finding(
                "collective-order.sizes" if is_one_call else "collective-order",
                first.at,
                f"collective {number} is {describe_collective(evidence, first)} on rank 0 and "
                f"{describe_collective(evidence, second)} on rank 1",
                0,
            )
            return
    if stands_still(evidence) and not evidence.run.deadlock:  # whose own finding says more
        yield from unanswered_backward(evidence)


def have_different_shapes(first: ScriptCollective, second: ScriptCollective, is_last: bool) -> bool:
    """Return whether shapes differ in a collective that needs equal ones.

    NCCL gathers tensors of different shapes, and gloo does not: the run comes no further.
    """
    allows_any_shape = "gather" in first.op and not is_last
    allows_any_shape |= first.op == "broadcast_object_list"
    return first.shape != second.shape and not allows_any_shape


def describe_collective(evidence: RunEvidence, event: ScriptCollective) -> str:
    shape = f" of shape {event.shape}" if event.shape is not None else ""
    return f"{event.op}{shape} at {evidence.location(event.at)}"


def unanswered_collective(
    evidence: RunEvidence, rank: int, event: ScriptCollective, number: int
) -> Findings:
    """Find a rank that waits in a collective which the other rank does not reach."""
    peer = 1 - rank
    peer_log = evidence.ranks[peer]
    peer_ended_by_itself = peer_log.has_ended and not peer_log.select(EnoughPasses)
    if evidence.run.has_raised or not (evidence.run.has_stalled or peer_ended_by_itself):
        return
    if list(uneven_end(evidence)):  # which has its own finding
        return
    test = test_of_rank(evidence, event)
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
    # A rank that waits when no rank can go on is ended by us, or by what it waits for, and may
    # write that down. One without a stack was ending by itself.
    is_stuck = status is not None and bool(status.stack)
    if status is not None and status.is_waiting:
        status = replace(status, state=ProcessState.RUNNING)
    if log.has_ended and not is_stuck:
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


def unanswered_backward(evidence: RunEvidence) -> Findings:
    """Find a rank in a backward pass, with the wrapper's collectives, that the other lacks."""
    backwards = [log.select(Backward) for log in evidence.first_ranks]
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


@run_rule("no-destroy")
def no_destroy(evidence: RunEvidence) -> Findings:
    """Find a process group that the script makes, and that is still there when its ranks end."""
    run = evidence.run
    made = [event for _, event in run.select(GroupInit) if event.direct]
    ranks_with_group = [rank for rank, event in run.select(ProcessExit) if event.group]
    is_over = run.has_finished and not run.has_stalled and not run.was_cut_short
    if made and is_over and ranks_with_group:
        text = f"is still there when {len(ranks_with_group)} ranks end"
        yield evidence.finding(
            "no-destroy", made[0].at, f"the group is made on {len(made)} ranks, and {text}"
        )


@run_rule("cuda-only")
def cuda_only(evidence: RunEvidence) -> Findings:
    """Find a process group on NCCL in a script that never asks whether there is a GPU."""
    if evidence.run.select(GpuQuery):
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
