"""Finds out that no rank can go on: each waits for another, or for a lock that nobody gives back.

A rank that downloads, computes or sleeps keeps the others waiting, and yet can go on: that is no
deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.hang import LOCK_FILES, MAX_LOCK_DEPTH, explain_hang, is_in_lock
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus
from stepladder.rank.stacks import Stack

# For which all ranks were quiet before they are looked at, and between the two looks.
QUIET_S = 3.0
PAUSE_S = 1.0
WAITS_FOR_A_PROGRAM = "subprocess.py"
IDLE_THREAD_FILES = (*LOCK_FILES, "concurrent/futures/thread.py")


class DeadlockFinder:
    """Looks at all ranks twice: they are in a deadlock if both looks show the same one."""

    def __init__(self) -> None:
        self._last_look: list[str] = []

    def examine(self, statuses: Sequence[RankStatus]) -> Explanation | None:
        """Return why no rank can go on; None where one may, and at the first look.

        Args:
            statuses: All ranks, also those that have ended.
        """
        last_look = self._last_look
        self._last_look = [status.describe_position() for status in statuses]
        if not are_stuck(statuses) or self._last_look != last_look:
            return None
        return explain_hang(statuses)


def are_stuck(statuses: Sequence[RankStatus]) -> bool:
    """Return whether every rank that still runs waits, and one of them for other ranks."""
    running = [status for status in statuses if status.state is ProcessState.RUNNING]
    if len(statuses) < 2 or not all(map(is_stuck, running)):
        return False
    return any(status.is_waiting for status in running)


def is_stuck(status: RankStatus) -> bool:
    """Return whether a rank waits for another, or for a lock with no other thread to release it."""
    if status.is_waiting:
        return True
    if status.workers or not is_in_lock(status):
        return False
    has_program = any(frame.file.endswith(WAITS_FOR_A_PROGRAM) for frame in status.stack)
    has_busy_thread = not all(map(_is_idle, status.threads[1:]))
    return not has_program and not has_busy_thread


def _is_idle(thread: Stack) -> bool:
    """Return whether a thread waits for work, or is this package's own."""
    for frame in thread[:MAX_LOCK_DEPTH]:
        if frame.is_stepladder or frame.file.endswith(IDLE_THREAD_FILES):
            return True
    return False
