"""The rule for ranks that wait for each other, and what the stacks of such ranks tell."""

from __future__ import annotations

import ast

from stepladder.launcher.diagnose.explanation import describe_other_threads
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus, is_in_queue
from stepladder.rank.stacks import Frame
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.check.script_source import lines_of
from stepladder.tools.probe.events import CodeLine


@run_rule("hang", "hang.queue")
def hang(evidence: RunEvidence) -> Findings:
    """Find ranks that wait for each other, so that none can go on."""
    deadlock = evidence.run.deadlock
    if deadlock is None:
        return
    statuses = {status.rank: status for status in deadlock.ranks}
    rank = deadlock.rank if deadlock.rank is not None else min(statuses)
    status = statuses[rank]
    # A rank that has ended has no line: that of a rank that waits for it.
    frames = [peer.frame for peer in [status, *deadlock.ranks]]
    frame = next(filter(None, frames), None)
    line = line_of(frame) if frame else None
    is_starved = is_in_queue(status.stack) and not status.is_loading_data
    yield evidence.finding(
        "hang.queue" if is_starved else "hang",
        line,
        "; ".join([deadlock.with_cause, *describe_other_threads(status)]),
        rank,
    )


def line_of(frame: Frame) -> CodeLine:
    return CodeLine(frame.file, frame.line, frame.function)


def has_left_loop_of(evidence: RunEvidence, rank: int, peer: int) -> bool | None:
    """Return whether a rank of a deadlock has ended, or left the loop in which a peer waits.

    None where there is no deadlock.
    """
    deadlock = evidence.run.deadlock
    if deadlock is None:
        return None
    statuses = {status.rank: status for status in deadlock.ranks}
    if rank not in statuses or peer not in statuses:
        return False
    if statuses[rank].state is ProcessState.DONE:
        return True
    for frame in statuses[peer].stack:
        if loop := innermost_loop(evidence, line_of(frame)):
            return not is_in_lines(statuses[rank], frame, loop)
    return False


def innermost_loop(evidence: RunEvidence, line: CodeLine | None) -> range | None:
    """Return the lines of the innermost loop around a line; None where the script has none."""
    return next(iter(loops_around(evidence, line)), None)


def loops_around(evidence: RunEvidence, line: CodeLine | None) -> list[range]:
    """Return the lines of the loops around a line, the innermost first."""
    file = evidence.source_file(line)
    if line is None or file is None:
        return []
    nodes = [node for node in ast.walk(file.tree) if isinstance(node, ast.For | ast.While)]
    return sorted((lines for lines in map(lines_of, nodes) if line.line in lines), key=len)


def is_in_lines(status: RankStatus, peer_frame: Frame, lines: range) -> bool:
    """Return whether a rank is in these lines of the function in which its peer is."""
    return any(
        frame.file == peer_frame.file
        and frame.function == peer_frame.function
        and frame.line in lines
        for frame in status.stack
    )
