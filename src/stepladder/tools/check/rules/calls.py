"""R7: all ranks make the same calls in the same order, and as many steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import TypeGuard

from stepladder.launcher.diagnose.rank_status import ProcessState
from stepladder.tools.check.events import (
    Backward,
    Batch,
    EnoughPasses,
    Forward,
    JoinContext,
    OptimizerStep,
    ScriptCollective,
    WrapperBuilt,
)
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule
from stepladder.tools.check.script_source import SourceFile, find_nodes, lines_of

DDP = "DistributedDataParallel"
# Of other collectives, and of one with other shapes.
RULES_OF_COLLECTIVES = ("collective-order", "collective-order.sizes")
LEAVES = (ast.Continue, ast.Break, ast.Return)
BLOCKS = (ast.For, ast.While, ast.FunctionDef, ast.Module)
Exchange = Backward | ScriptCollective
Exchanges = tuple[Exchange | None, Exchange | None]  # of two ranks


@rank_rule(
    "uneven-steps",
    "uneven-steps.skipped",
    "collective-order",
    "collective-order.skipped",
    "collective-order.sizes",
)
def calls(evidence: RunEvidence) -> Findings:
    """Find the first call that two ranks do not make alike, and its cause.

    A rank that has skipped a batch or a collective differs from then on. Ranks in a Join context
    make different numbers of steps.
    """
    joined = bool(evidence.run.select(JoinContext))
    differing = first_difference(evidence, averages(evidence) and not joined)
    skipped = list(skipped_collective(evidence, differing))
    uneven = [] if joined else [*skipped_batch(evidence), *uneven_passes(evidence)]
    found = skipped or uneven or list(different_calls(evidence, differing))
    yield from found[:1]
    if not found and not joined:
        yield from uneven_backwards(evidence)


def averages(evidence: RunEvidence) -> bool:
    """Return whether each backward pass of each rank averages gradients, as DDP does."""
    for log in evidence.first_ranks:
        made = [call for call in log.select(Forward) if call.grad and call.wrapped]
        if not made or any(call.wrapped != DDP or not call.sync for call in made):
            return False
    return True


def first_difference(evidence: RunEvidence, with_backwards: bool) -> Exchanges:
    """Return the first calls of two ranks that are not alike; none where all are."""
    exchanges = [exchanges_of(log, with_backwards) for log in evidence.first_ranks]
    last = min(map(len, exchanges)) - 1
    for number, (first, second) in enumerate(zip_longest(*exchanges)):
        if is_collective(first) and is_collective(second):
            is_last = number == last and not evidence.run.has_finished
            if first.op == second.op and not differ_in_shape(first, second, is_last):
                continue
        if type(first) is not type(second) or is_collective(first):
            return first, second
    return None, None


def exchanges_of(log: RankLog, with_backwards: bool) -> list[Exchange]:
    """Return the collectives of all ranks, and the backward passes if these are some."""
    events: list[Exchange] = log.select(Backward, ScriptCollective)
    return [
        event
        for event in events
        if not getattr(event, "group", "") and (with_backwards or is_collective(event))
    ]


def is_collective(event: Exchange | None) -> TypeGuard[ScriptCollective]:
    return isinstance(event, ScriptCollective)


def differ_in_shape(first: ScriptCollective, second: ScriptCollective, is_last: bool) -> bool:
    """Return whether shapes differ in a collective that needs equal ones.

    NCCL gathers tensors of different shapes, and gloo does not: the run comes no further.
    """
    allows_any_shape = "gather" in first.op and not is_last
    allows_any_shape |= first.op == "broadcast_object_list"
    return first.shape != second.shape and not allows_any_shape


def skipped_collective(evidence: RunEvidence, differing: Exchanges) -> Findings:
    """Find a collective under an `if` to which one rank comes, while the other trains on."""
    rank = int(not is_collective(differing[0]))
    collective, backward = differing[rank], differing[1 - rank]
    if not is_collective(collective) or not isinstance(backward, Backward):
        return
    conditions = list(conditions_of(evidence, collective, backward))
    if conditions:
        yield evidence.finding(
            "collective-order.skipped",
            collective.at,
            f"rank {rank} comes to {describe_collective(evidence, collective)}, and rank "
            f"{1 - rank} goes on with the next backward pass, whose collectives are DDP's: "
            f"{conditions[0]}",
            1 - rank,
        )


def conditions_of(
    evidence: RunEvidence, collective: ScriptCollective, backward: Backward
) -> Iterator[str]:
    """Yield each `if` that decides about a collective, and not about a backward pass.

    The innermost come first. There are none where no loop leads to both: then the other rank has
    not come to the end of its loop.
    """
    others = dict(frames_of(backward))
    is_in_loop = False
    conditions: list[str] = []
    for name, line in frames_of(collective):
        for file in evidence.source.files:
            if name_of_function(file, line) != name:
                continue
            is_in_loop |= any(
                line in lines_of(loop) and others.get(name) in lines_of(loop)
                for loop in [*find_nodes(file.tree, ast.For), *find_nodes(file.tree, ast.While)]
            )
            for node in reversed([*find_nodes(file.tree, ast.If)]):
                is_here = name_of_function(file, node.lineno) == name
                is_of_both = others.get(name) in lines_of(node)
                if is_here and not is_of_both and decides(file, node, line):
                    conditions.append(f"`if {ast.unparse(node.test)}`, {file.name}:{node.lineno}")
    if is_in_loop:
        yield from conditions


def frames_of(event: Exchange) -> Iterator[tuple[str, int]]:
    """Yield the functions and lines that lead to an event, from the innermost one outwards."""
    for frame in filter(None, event.way.split(" < ")):
        name, _, line = frame.rpartition(":")
        yield name, int(line)


def name_of_function(file: SourceFile, line: int) -> str:
    """Return the innermost function around a line."""
    functions = [f for f in find_nodes(file.tree, ast.FunctionDef) if line in lines_of(f)]
    return functions[-1].name if functions else "<module>"


def decides(file: SourceFile, condition: ast.If, line: int) -> bool:
    """Return whether an `if` is around a line, or leaves the loop or the function around it."""
    if line in lines_of(condition):
        return True
    block = next(node for node in file.parents_of(condition) if isinstance(node, BLOCKS))
    leaves = isinstance(condition.body[-1], LEAVES) and condition.lineno < line
    return leaves and not isinstance(block, ast.Module) and line in lines_of(block)


def different_calls(evidence: RunEvidence, differing: Exchanges) -> Findings:
    """Find calls that differ by their kind or shape, or that only one rank makes."""
    first, second = differing
    if is_collective(first) and is_collective(second):
        is_one_call = first.op == second.op and first.at == second.at
        yield evidence.finding(
            RULES_OF_COLLECTIVES[is_one_call],
            first.at,
            f"the ranks call {describe_collective(evidence, first)} on rank 0 and "
            f"{describe_collective(evidence, second)} on rank 1",
            0,
        )
    elif first and second and stands_still(evidence):
        yield from left_loop(evidence, int(not is_collective(first)))
    elif not (first and second) and (first or second):
        yield from unanswered_call(evidence, int(not first), first or second)


def unanswered_call(evidence: RunEvidence, rank: int, event: Exchange | None) -> Findings:
    """Find a rank that waits in a call which the other rank does not make."""
    peer = 1 - rank
    peer_log = evidence.ranks[peer]
    peer_ended_by_itself = peer_log.has_ended and not peer_log.select(EnoughPasses)
    is_over = evidence.run.has_stalled or peer_ended_by_itself
    if event is None or evidence.run.has_raised or not is_over:
        return
    if isinstance(event, Backward):
        # Of a rank in a deadlock its own finding says more.
        if peer_log.has_ended or is_done(evidence, peer) or evidence.run.deadlock is None:
            yield from left_loop(evidence, peer)
        return
    yield evidence.finding(
        "collective-order",
        event.at,
        f"rank {rank} waits in {describe_collective(evidence, event)}, and rank {peer} has not "
        f"come: {describe_last_event(evidence, peer_log)}",
        rank,
    )


def left_loop(evidence: RunEvidence, fewer: int) -> Findings:
    """Yield that a rank has left the training loop while the other is still in it."""
    backwards = [log.select(Backward) for log in evidence.first_ranks]
    if backwards[fewer]:
        passes = evidence.ranks[fewer].training_passes
        steps = len(evidence.ranks[fewer].select(OptimizerStep))
        yield evidence.finding(
            "uneven-steps",
            passes[-1].line if passes else backwards[fewer][-1].at,
            f"rank {fewer} has left the loop after {steps} steps, and rank {1 - fewer} is in its "
            f"step {len(backwards[1 - fewer])}",
            fewer,
        )


def is_done(evidence: RunEvidence, rank: int) -> bool:
    """Return whether a rank of a deadlock has ended."""
    statuses = evidence.run.deadlock.ranks if evidence.run.deadlock else ()
    return any(each.rank == rank and each.state is ProcessState.DONE for each in statuses)


def describe_collective(evidence: RunEvidence, event: ScriptCollective) -> str:
    shape = f" of shape {event.shape}" if event.shape is not None else ""
    return f"{event.op}{shape} at {evidence.location(event.at)}"


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


def stands_still(evidence: RunEvidence) -> bool:
    """Return whether ranks could not go on because of each other."""
    return evidence.run.has_stalled and not evidence.run.has_raised


def skipped_batch(evidence: RunEvidence) -> Findings:
    """Find the first batch that one of two ranks has left out, and the other has trained on."""
    if not averages(evidence):
        return
    for passes in align(log.training_passes for log in evidence.first_ranks):
        trained = [backwards_of_batches(one_pass) for one_pass in passes]
        # A thread that reads ahead has recorded batches before those that are trained.
        reads_ahead = any(len(backwards) > 1 for of_rank in trained for backwards in of_rank)
        for number, (first, second) in enumerate(zip(*trained, strict=False), start=1):
            if bool(first) != bool(second) and not reads_ahead:
                rank = int(bool(first))
                yield evidence.finding(
                    "uneven-steps.skipped",
                    (first or second)[0].at,
                    f"rank {rank} makes no backward pass for batch {number} of pass "
                    f"{passes[rank].number}, and rank {1 - rank} makes one",
                    rank,
                )
                return


def backwards_of_batches(one_pass: LoaderPass) -> list[list[Backward]]:
    """Return for each batch before the last one the backward passes that have followed it."""
    batches: list[list[Backward]] = []
    for event in one_pass.events:
        if isinstance(event, Batch) and event.number == one_pass.number:
            batches.append([])
        elif isinstance(event, Backward) and batches:
            batches[-1].append(event)
    return batches[:-1]


def uneven_passes(evidence: RunEvidence) -> Findings:
    """Find passes with more batches on one rank than on another."""
    for passes in zip_longest(*(log.training_passes for log in evidence.ranks)):
        present = [one_pass for one_pass in passes if one_pass]
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


def uneven_backwards(evidence: RunEvidence) -> Findings:
    """Compare the number of backward passes, for loops without a loader.

    Those at lines of one rank alone are of a model that it trains for itself.
    """
    run = evidence.run
    if any(log.training_passes for log in run.ranks) or run.was_cut_short:
        return
    backwards = [log.select(Backward) for log in evidence.first_ranks]
    lines = set.intersection(*({event.at for event in events} for events in backwards))
    counts = [sum(event.at in lines for event in events) for events in backwards]
    fewer = counts.index(min(counts))
    is_over = run.has_finished or (stands_still(evidence) and evidence.ranks[fewer].has_ended)
    if is_over and counts[0] != counts[1] and min(counts) > 1:
        yield evidence.finding(
            "uneven-steps",
            backwards[1 - fewer][-1].at,
            f"rank 0 makes {counts[0]} backward passes and rank 1 {counts[1]}",
            1 - fewer,
        )


@rank_rule("collective-order.buffers")
def lone_evaluation(evidence: RunEvidence) -> Findings:
    """Find a wrapped model that one rank alone calls, in a run that came no further.

    DDP broadcasts buffers before the first call after a training step. The other ranks take them
    for their next collective, or have ended.
    """
    run = evidence.run
    broadcasts = any(event.buffers and event.holds_buffers for _, event in run.select(WrapperBuilt))
    made = [(rank, call) for rank, call in run.select(Forward) if call.wrapped == DDP]
    have_trained = {rank for rank, call in made if call.grad} >= {
        log.rank for log in evidence.ranks
    }
    if run.has_finished or not broadcasts or not have_trained:
        return
    for log in evidence.ranks:
        for first in (call for rank, call in made if rank == log.rank and not call.grad):
            ranks_there = {rank for rank, call in made if call.at == first.at}
            later = [event for event in log.select(Backward) if event.n > first.n]
            if ranks_there == {log.rank} and len(later) <= 1:  # in which it may wait
                yield evidence.finding(
                    "collective-order.buffers",
                    first.at,
                    f"rank {log.rank} alone calls the wrapped model, whose wrapper broadcasts "
                    "its buffers",
                    log.rank,
                )
                return
