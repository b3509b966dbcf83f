"""Detects a deadlock: every rank waits for another rank, or for a lock that is never released.

It is no deadlock if one rank downloads, computes or sleeps while the others wait for it: that rank
will continue.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.hang import LOCK_FILES, MAX_LOCK_DEPTH, explain_hang, is_in_lock
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus
from stepladder.rank.stacks import Stack

QUIET_S = 3.0  # how long all ranks must be idle before the first examination
PAUSE_S = 1.0  # between the first examination and the second
PROGRAM_FILE = "subprocess.py"  # in the stack of a thread that waits for a program
IDLE_THREAD_FILES = (*LOCK_FILES, "concurrent/futures/thread.py")


class DeadlockFinder:
    """Examines all ranks twice: a deadlock is where no rank has moved between the two times."""

    def __init__(self) -> None:
        self._last_positions: list[str] = []

    def examine(self, statuses: Sequence[RankStatus]) -> Explanation | None:
        """Return why no rank can continue; None if one may, and at the first examination.

        Args:
            statuses: All ranks, also those that have ended.
        """
        last_positions = self._last_positions
        self._last_positions = [status.describe_position() for status in statuses]
        if not are_stuck(statuses) or self._last_positions != last_positions:
            return None
        return explain_hang(statuses)


def are_stuck(statuses: Sequence[RankStatus]) -> bool:
    """Return whether every rank that still runs waits, and one for other ranks or its threads."""
    running = [status for status in statuses if status.state is ProcessState.RUNNING]
    if len(statuses) < 2 or not all(map(_is_stuck, running)):
        return False
    return any(status.is_waiting or _waits_for_threads(status) for status in running)


def _waits_for_threads(status: RankStatus) -> bool:
    """Return whether a rank waits for a queue that only its own threads can fill."""
    return any(call.file.endswith("/queue.py") for call in status.stack[:MAX_LOCK_DEPTH])


def _is_stuck(status: RankStatus) -> bool:
    """Return whether a rank waits for another, or for a lock with no other thread to release it."""
    if status.is_waiting:
        return True
    if status.workers or not is_in_lock(status):
        return False
    has_program = any(frame.file.endswith(PROGRAM_FILE) for frame in status.stack)
    has_busy_thread = not all(map(_is_idle, status.threads[1:]))
    return not has_program and not has_busy_thread


def _is_idle(thread: Stack) -> bool:
    """Return whether a thread waits for work, or belongs to this package."""
    for frame in thread[:MAX_LOCK_DEPTH]:
        if frame.is_stepladder or frame.file.endswith(IDLE_THREAD_FILES):
            return True
    return False
