"""Notice that a learner's processes have all stopped working, and explain which one waits where.

`stepladder run` knows its ranks. An exercise starts its processes in its own way, so they are
inspected from outside: what they have computed, and the stacks that they write when aborted.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.rank_status import RankStatus
from stepladder.rank.stacks import ABORT_TEXT, Stack, parse_faulthandler

HANG_TIMEOUT_S = 10.0
MAX_IDLE_SHARE = 0.02  # of one core: a process that polls is idle too
ABORT_TIMEOUT_S = 2.0
SLEEPING_STATES = (psutil.STATUS_SLEEPING, psutil.STATUS_IDLE, psutil.STATUS_ZOMBIE)


def list_process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and all of its descendants, the oldest first."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class StallMeter:
    """Measures for how long all processes of a tree have slept."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s: dict[int, float] = {}
        self._since = time.monotonic()

    def poll(self) -> float:
        """Return the seconds since any process has worked, begun or ended."""
        now = time.monotonic()
        cpu_s: dict[int, float] = {}
        is_working = False
        for process in list_process_tree(self._pid):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                cpu_s[process.pid] = times.user + times.system
                is_working = is_working or process.status() not in SLEEPING_STATES
        worked_s = sum(cpu_s.values()) - sum(self._cpu_s.values())
        has_same_processes = cpu_s.keys() == self._cpu_s.keys()
        is_idle = has_same_processes and worked_s <= MAX_IDLE_SHARE * (now - self._since) + 0.01
        if is_working or not is_idle:
            self._cpu_s = cpu_s
            self._since = now
        return now - self._since


def abort_process_tree(pid: int) -> list[psutil.Process]:
    """Send SIGABRT to each process: with PYTHONFAULTHANDLER, Python then prints its stacks.

    All processes are suspended first. Otherwise the end of one process could wake another one,
    whose stack would then no longer show where it hung.

    Returns:
        The processes in the order in which they print.
    """
    members = list_process_tree(pid)
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.suspend()
    for member in members:
        with suppress(psutil.NoSuchProcess):
            if hasattr(member, "rlimit"):  # Linux: write no core file
                member.rlimit(psutil.RLIMIT_CORE, (0, 0))
            member.send_signal(signal.SIGABRT)
            member.resume()
            # Wait for each process in turn, so that their stacks do not interleave.
            with suppress(psutil.TimeoutExpired):
                member.wait(ABORT_TIMEOUT_S)
    return members


def find_ranks(members: Sequence[psutil.Process]) -> dict[int, int]:
    """Return the rank of each process by its id: as its environment says, else in order of start.

    This must be called before the processes are aborted.
    """
    ranks: dict[int, int] = {}
    for member in members:
        with suppress(psutil.Error, InputError):
            world = World.detect(member.environ())
            if world.world_size > 1:
                ranks[member.pid] = world.rank
    return ranks


def explain_output(
    output: str, members: Sequence[int], ranks: dict[int, int], lead: str, seconds: float
) -> str:
    """Return where processes were, from what they printed as they were aborted; "" if unknown.

    Args:
        output: The text, with the stacks of each process after a line of faulthandler.
        members: The ids of the processes in the order in which they printed.
        ranks: The rank of a process, as far as it is known.
        lead: What has happened for so many seconds, the beginning of the report.
        seconds: For how many.
    """
    parts = output.split(ABORT_TEXT)[1:]
    if len(parts) != len(members):  # a process that is not Python prints no stacks
        return ""
    stacks = dict(zip(members, map(parse_faulthandler, parts), strict=True))
    users_stacks = {pid: threads for pid, threads in stacks.items() if _is_in_users_code(threads)}
    root = members[0]
    if len(users_stacks) > 1:
        users_stacks.pop(root, None)  # it only waits for the processes that it has started
    statuses = [
        RankStatus(ranks.get(pid, index), pid, threads=threads)
        for index, (pid, threads) in enumerate(users_stacks.items())
    ]
    if not statuses:
        return ""
    explanation = explain_hang(sorted(statuses, key=lambda status: status.rank))
    return explanation.format_report(lead, seconds)


def _is_in_users_code(threads: Sequence[Stack]) -> bool:
    """Return whether a process runs a file of the learner, and not only a helper of Python's."""
    return bool(threads) and any(
        frame.is_users and Path(frame.file).is_absolute() for frame in threads[0]
    )
