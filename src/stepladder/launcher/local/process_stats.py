"""Facts about processes that are read from outside: whether one is stopped, idle or computing."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import psutil

T = TypeVar("T")
POLLS_LOST_BY_NOISE = 10
IDLE_CPU_S = 0.015  # between two polls: at most one tick of the kernel's clock


def _query_process(pid: int, query: Callable[[psutil.Process], T], default: T) -> T:
    """Return the result of a query of a process, or the default if the process has ended."""
    import psutil  # late: it would take a third of the time of `train --help`

    with suppress(psutil.NoSuchProcess):
        return query(psutil.Process(pid))
    return default


def is_alive(pid: int) -> bool:
    """Return whether a process runs, and is no zombie."""
    return _query_process(pid, lambda process: process.status() != "zombie", False)


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP or Ctrl-Z has stopped the process. A debugger does not count."""
    return _query_process(pid, lambda process: process.status() == "stopped", False)


def read_cpu_seconds(pid: int) -> float:
    """Return the time that a process has computed, in user and system mode."""
    return _query_process(pid, lambda process: sum(process.cpu_times()[:2]), 0.0)


def read_busy_seconds(pid: int) -> float:
    """Return the time for which the threads of a process have computed, or waited for a core.

    On a busy machine a process may compute little, and yet be anything but idle.
    """
    busy_ns = 0
    with suppress(OSError):  # the process has ended
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError, ValueError):  # the thread has ended
                computed, waited, _ = path.read_text(encoding="utf-8").split()
                busy_ns += int(computed) + int(waited)
    return busy_ns / 1e9


def _count_context_switches(pid: int) -> tuple[int, int]:
    """Return how often the kernel has taken the main thread of a process off a core.

    The two numbers, of voluntary and involuntary switches, do not change while the thread sleeps.
    """
    return _query_process(pid, lambda process: tuple(process.num_ctx_switches()), (0, 0))


def sleeps(pid: int) -> bool:
    """Return whether all threads of a process sleep: none of them runs, or would if it could.

    So a process that computes and gets no core, on a busy machine, does not sleep.
    """
    states = set()
    with suppress(OSError):  # the process has ended
        for path in Path(f"/proc/{pid}/task").glob("*/stat"):
            with suppress(OSError):  # the thread has ended
                states.add(path.read_text(encoding="utf-8").rpartition(") ")[2][:1])
    return states == {"S"}


def find_children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    return _query_process(
        pid, lambda process: sorted(child.pid for child in process.children()), []
    )


def count_oom_kills() -> int:
    """Return how often the kernel has killed a process for lack of memory since it started."""
    try:
        statistics = Path("/proc/vmstat").read_text(encoding="utf-8")
    except OSError:
        return 0
    match = re.search(r"^oom_kill (\d+)$", statistics, re.MULTILINE)
    if match is None:
        return 0
    return int(match.group(1))


class IdleKind(Enum):
    """The ways in which a process is idle."""

    # Its main thread has not run at all. A process that waits in a collective of gloo is asleep;
    # one that completes collectives is not, however slow its steps are.
    ASLEEP = auto()
    # It has hardly computed, but may wake up to check for something, as the first rank does while
    # the process group forms.
    IDLE = auto()
    # None of its threads was seen to run. A rank that waits in shared memory wakes up now and then
    # to look, and is not asleep, but quiet.
    QUIET = auto()


class IdleMeter:
    """Counts the polls for which a process has been idle."""

    def __init__(self) -> None:
        self.context_switches = (-1, -1)
        self._cpu_s = -1.0
        self._counts = dict.fromkeys(IdleKind, 0)

    def count(self, kind: IdleKind) -> int:
        """Return for how many polls the process has been idle in this way."""
        return self._counts[kind]

    @property
    def max_count(self) -> int:
        """The number of polls for which the process has been asleep or idle."""
        return max(self._counts[IdleKind.ASLEEP], self._counts[IdleKind.IDLE])

    def poll(self, pid: int) -> None:
        """Compare the process with its state at the last poll."""
        previous_switches = self.context_switches
        previous_cpu_s = self._cpu_s
        self.reset(pid)
        is_asleep = self.context_switches == previous_switches
        is_idle = self._cpu_s - previous_cpu_s <= IDLE_CPU_S
        self._counts[IdleKind.ASLEEP] = self.count(IdleKind.ASLEEP) + 1 if is_asleep else 0
        self._counts[IdleKind.IDLE] = self.count(IdleKind.IDLE) + 1 if is_idle else 0
        # A thread of a library that wakes up for a moment does not end the quiet.
        change = 1 if sleeps(pid) else -POLLS_LOST_BY_NOISE
        self._counts[IdleKind.QUIET] = max(0, self.count(IdleKind.QUIET) + change)

    def reset(self, pid: int) -> None:
        """Ignore the activity since the last poll, such as that of printing a stack."""
        self.context_switches = _count_context_switches(pid)
        self._cpu_s = read_cpu_seconds(pid)
