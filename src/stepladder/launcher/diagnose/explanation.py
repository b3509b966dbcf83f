"""The explanation of a hang: one sentence, its usual cause, and the stacks of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepladder.core.numbers import format_count
from stepladder.launcher.diagnose.rank_status import (
    ProcessState,
    RankStatus,
    describe_frame,
    is_idle_worker,
    list_worker_calls,
)
from stepladder.rank.progress import PHASES
from stepladder.rank.stacks import Stack, find_user_frame

MAX_FRAMES_SHOWN = 8
MAX_RANKS_SHOWN = 8


@dataclass(frozen=True)
class Explanation:
    """Why ranks make no progress.

    Args:
        rank: The rank to look at first, or None if there is no single one.
        sentence: What the ranks do, without a full stop.
        cause: What usually causes it, without a full stop.
        ranks: The status of each rank.
        is_abort: Whether compiled code has aborted the rank in a collective.
        left_early: Whether the rank has finished while the others still needed it.
    """

    rank: int | None
    sentence: str
    cause: str
    ranks: Sequence[RankStatus]
    is_abort: bool = False
    left_early: bool = False

    @property
    def with_cause(self) -> str:
        """The sentence with its usual cause."""
        return f"{self.sentence}. Usual cause: {self.cause}"

    def format_report(self, lead: str, seconds: float) -> str:
        """Return all of it as lines for a terminal.

        Args:
            lead: What has happened for so many seconds, the beginning of the report.
            seconds: For how many.
        """
        lines = [
            f"stepladder: {lead} for {seconds:.0f} s: {self.sentence}",
            f"  usual cause: {self.cause}",
        ]
        ordered = sorted(self.ranks, key=lambda status: (status.rank != self.rank, status.rank))
        for status in ordered[:MAX_RANKS_SHOWN]:
            lines += format_rank(status)
        hidden_count = len(ordered) - MAX_RANKS_SHOWN
        if hidden_count > 0:
            lines.append(f"  ... and {hidden_count} more ranks")
        return "\n".join(lines)


def format_rank(status: RankStatus) -> list[str]:
    """Return lines with a rank's progress, its main thread's stack, other threads and workers."""
    lines = [_format_progress(status)]
    lines += [f"    {describe_frame(frame)}" for frame in _select_frames(status.stack)]
    inner_calls = _list_inner_calls(status.stack)
    if inner_calls:
        count = format_count(len(inner_calls), "call")
        lines.append(f"    {count} of Stepladder, down to {inner_calls[0]}")
    has_ended = status.state in (ProcessState.DONE, ProcessState.ENDED)
    if not status.stack and not has_ended:
        lines.append("    no stack: it did not answer")
    lines += [f"    {line}" for line in describe_other_threads(status)]
    for pid, stack in sorted(status.workers.items()):
        frame = find_user_frame(list_worker_calls(stack))
        if is_idle_worker(stack):
            lines.append(f"    worker {pid}: idle, waits for the next index")
        elif frame is not None:
            lines.append(f"    worker {pid}: {describe_frame(frame)}")
    return lines


def describe_other_threads(status: RankStatus) -> list[str]:
    """Return where those threads of a rank are that are in the user's code, the main one aside."""
    frames = map(find_user_frame, status.threads[1:])
    return [
        f"another thread: {describe_frame(frame)}" for frame in frames if frame and frame.is_users
    ]


def _format_progress(status: RankStatus) -> str:
    progress = status.progress
    facts = [f"[rank {status.rank}] pid {status.pid}"]
    if status.state is not ProcessState.RUNNING:
        facts.append(str(status.state))
    if progress.step:
        facts.append(f"step {progress.step}")
    if progress.phase:
        facts.append(PHASES[progress.phase])
    if progress.num_collectives:
        facts.append(f"{progress.num_collectives} collectives begun")
    return f"  {', '.join(facts)}"


def _select_frames(stack: Stack) -> Stack:
    """Return the calls that matter, innermost first.

    They are the innermost call, the user's own calls, and the call of this package that made them.
    The calls inside of a collective of this package are left out if the user's code has called it.
    """
    stack = stack[len(_list_inner_calls(stack)) :]
    frames = [frame for index, frame in enumerate(stack) if index == 0 or not frame.is_library]
    for index, frame in enumerate(frames[1:], start=1):
        if frame.is_stepladder and not frames[index - 1].is_stepladder:
            return frames[: min(index + 1, MAX_FRAMES_SHOWN)]
    return frames[:MAX_FRAMES_SHOWN]


def _list_inner_calls(stack: Stack) -> Stack:
    """Return the calls of this package that the user's code waits for, the innermost first.

    There are none if the innermost call is not of this package, or none is of the user's code.
    """
    end = next((index for index, frame in enumerate(stack) if not frame.is_stepladder), 0)
    has_users_code = any(frame.is_users for frame in stack[end:])
    return stack[:end] if has_users_code else ()
