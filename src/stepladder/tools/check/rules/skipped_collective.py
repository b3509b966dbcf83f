"""Collectives that one rank skips while it goes on with the backward passes of a wrapped model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from stepladder.tools.check.events import (
    Backward,
    Forward,
    JoinContext,
    PassStart,
    ScriptCollective,
)
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import RunEvidence
from stepladder.tools.check.rules.hangs import loops_around
from stepladder.tools.check.rules.rank_values import RANK, chooses_ranks
from stepladder.tools.check.script_source import SourceFile, find_nodes
from stepladder.tools.probe.events import CodeLine

DDP = "DistributedDataParallel"
LEAVES_A_LOOP = (ast.Continue, ast.Break, ast.Return)


@dataclass(frozen=True)
class SkippedCollective:
    """A collective that one of the first two ranks has called, and the other has left out.

    Args:
        event: The call.
        rank: The rank that has called it.
        next_backward: The backward pass to which the other rank has gone on.
        condition: The `if` that decides it, with its line; empty where none was found.
    """

    event: ScriptCollective
    rank: int
    next_backward: Backward
    condition: str


def find_skipped(evidence: RunEvidence) -> SkippedCollective | None:
    """Return the first collective in a training loop that one rank skips.

    DDP's backward pass is a collective as well. Ranks with different numbers of batches differ in
    another way: the one with fewer leaves the loop.
    """
    logs = evidence.run.ranks[:2]
    if len(logs) < 2 or evidence.run.select(JoinContext) or not all(map(always_averages, logs)):
        return None
    earlier: list[Backward | ScriptCollective] = []
    for first, second in zip(*map(exchanges_of, logs), strict=False):
        if type(first) is not type(second):
            return skipped_of(evidence, first, second, earlier)
        if first.at != second.at:
            return None
        earlier.append(first)
    return None


def always_averages(log: RankLog) -> bool:
    """Return whether each backward pass of a model in DDP averages the gradients."""
    calls = [call for call in log.select(Forward) if call.grad and call.wrapped]
    return bool(calls) and all(call.wrapped == DDP and call.sync for call in calls)


def exchanges_of(log: RankLog) -> list[Backward | ScriptCollective]:
    """Return the backward passes, and the collectives of all ranks, in order."""
    events: list[Backward | ScriptCollective] = log.select(Backward, ScriptCollective)
    return [event for event in events if event.at and not getattr(event, "group", "")]


def skipped_of(
    evidence: RunEvidence,
    first: Backward | ScriptCollective,
    second: Backward | ScriptCollective,
    earlier: list[Backward | ScriptCollective],
) -> SkippedCollective | None:
    """Return the collective of two different events, if it is in a loop of the backward pass.

    A rank with fewer batches comes to a collective after the loop over batches, too: an `if` on the
    rank, or as many batches as before, tells that the other rank has left that loop as well.

    Args:
        evidence: The evidence, with the source.
        first: The first event of rank 0 that is of another kind on rank 1.
        second: That of rank 1.
        earlier: The events before, which are the same on both ranks.
    """
    rank = 0
    collective, backward = first, second
    if isinstance(first, Backward):
        rank = 1
        collective, backward = second, first
    assert isinstance(collective, ScriptCollective)
    assert isinstance(backward, Backward)
    if all(event.at != backward.at for event in earlier):
        return None
    loop = common_loop(evidence, backward, collective)
    if loop is None:
        return None
    conditions = list(conditions_of(evidence, collective, loop))
    of_rank = [node for _, node in conditions if chooses_ranks(node.test, RANK, evidence.source)]
    is_certain = loop.is_innermost or of_rank
    if not is_certain and not ends_as_before(earlier, collective):
        return None
    # The innermost one that asks for the rank, or else the innermost one.
    texts = [
        f"`if {ast.unparse(node.test)}`, {file.name}:{node.lineno}"
        for file, node in conditions
        if node in of_rank or not of_rank
    ]
    return SkippedCollective(collective, rank, backward, next(iter(texts), ""))


def ends_as_before(
    earlier: list[Backward | ScriptCollective], collective: ScriptCollective
) -> bool:
    """Return whether a collective comes after as many backward passes as an earlier time."""
    counts = [0]
    for event in earlier:
        if isinstance(event, Backward):
            counts[-1] += 1
        elif event.way == collective.way:
            counts.append(0)
    return counts[-1] in counts[:-1]


@dataclass(frozen=True)
class CommonLoop:
    """A loop around a backward pass and a collective.

    Args:
        function: The function that has the loop.
        lines: The lines of the loop.
        backward_line: The line within the loop that leads to the backward pass, or the last line of
            the inner loop that does.
        is_innermost: Whether no other loop is around the backward pass within this one.
    """

    function: str
    lines: range
    backward_line: int
    is_innermost: bool


def common_loop(
    evidence: RunEvidence, backward: Backward, collective: ScriptCollective
) -> CommonLoop | None:
    """Return the innermost loop that leads to a backward pass and to a collective."""
    is_innermost = True
    for file, name, line in source_frames_of(evidence, backward):
        for lines in loops_around(evidence, CodeLine(file.name, line, name)):
            if is_called_in_lines(collective, name, lines):
                return CommonLoop(name, lines, line, is_innermost)
            is_innermost = False
            line = lines[-1]
    return None


def source_frames_of(
    evidence: RunEvidence, event: Backward | PassStart | ScriptCollective
) -> Iterator[tuple[SourceFile, str, int]]:
    """Yield the files, functions and lines of the source that lead to an event, from inside out."""
    for name, line in frames_of(event):
        for file in evidence.source.files:
            if name_of_function(file, line) == name:
                yield file, name, line


def name_of_function(file: SourceFile, line: int) -> str:
    """Return the innermost function around a line."""
    name = "<module>"
    for function in find_nodes(file.tree, ast.FunctionDef):
        if function.lineno <= line <= (function.end_lineno or line):
            name = function.name
    return name


def is_called_in_lines(event: ScriptCollective, function: str, lines: range) -> bool:
    """Return whether a collective was called, also through others, in these lines of a function."""
    return any(name == function and line in lines for name, line in frames_of(event))


def frames_of(event: Backward | PassStart | ScriptCollective) -> Iterator[tuple[str, int]]:
    """Yield the functions and lines that lead to an event, from the innermost one outwards."""
    for frame in filter(None, event.way.split(" < ")):
        name, _, line = frame.rpartition(":")
        yield name, int(line)


def conditions_of(
    evidence: RunEvidence, collective: ScriptCollective, loop: CommonLoop
) -> Iterator[tuple[SourceFile, ast.If]]:
    """Yield each `if` within a loop that may keep a rank from a collective, the innermost first."""
    for file, name, line in source_frames_of(evidence, collective):
        is_loop = name == loop.function and line in loop.lines
        for node in conditions_before(file, name, line, loop.backward_line + 1 if is_loop else 0):
            yield file, node
        if is_loop:
            return


def conditions_before(file: SourceFile, function: str, line: int, first: int) -> Iterator[ast.If]:
    """Yield each `if` of a function, from a line on, that decides about a later one; last first."""
    for node in reversed([*find_nodes(file.tree, ast.If)]):
        is_near = first <= node.lineno <= line and name_of_function(file, node.lineno) == function
        if is_near and decides(node, line):
            yield node


def decides(condition: ast.If, line: int) -> bool:
    """Return whether an `if` is around a line, or leaves the loop or the function before it."""
    if line <= (condition.end_lineno or 0):
        return True
    return isinstance(condition.body[-1], LEAVES_A_LOOP)
