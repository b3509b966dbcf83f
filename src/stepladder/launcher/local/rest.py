"""What can be seen of a process from outside: whether it is stopped, rests or computes, what it has
started.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import psutil

T = TypeVar("T")
LITTLE = 0.015  # seconds of a core between two looks: at most one of the kernel's ticks


def told(pid: int, ask: Callable[[psutil.Process], T], gone: T) -> T:
    """What there is to be told of a process; `gone` where it has ended."""
    import psutil  # late: it would be a third of the time that `train --help` takes

    with suppress(psutil.NoSuchProcess):
        return ask(psutil.Process(pid))
    return gone


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or Ctrl-Z holds the process; one under a debugger is not meant."""
    return told(pid, lambda process: process.status() == "stopped", False)


def cpu_seconds(pid: int) -> float:
    """Time that a process has computed, in user and system mode."""
    return told(pid, lambda process: sum(process.cpu_times()[:2]), 0.0)


def switches(pid: int) -> tuple[int, int]:
    """How often the kernel has taken the process's main thread off a core. One that sleeps keeps
    its number.
    """
    return told(pid, lambda process: tuple(process.num_ctx_switches()), (0, 0))


def children_of(pid: int) -> list[int]:
    return told(pid, lambda process: sorted(child.pid for child in process.children()), [])


class Rest:
    """For how many looks a process has rested.

    asleep: its main thread has not run at all. One that waits in a collective of gloo's does not;
    one that gets through a collective does, however slow its steps are.  idle: it has hardly
    computed, but may look around, as the first rank does while the group forms."""

    def __init__(self) -> None:
        self.asleep = self.idle = 0
        self.switches, self.cpu = (-1, -1), -1.0

    def look(self, pid: int) -> None:
        before = self.switches, self.cpu
        self.forgive(pid)
        self.asleep = self.asleep + 1 if self.switches == before[0] else 0
        self.idle = self.idle + 1 if self.cpu - before[1] <= LITTLE else 0

    def forgive(self, pid: int) -> None:
        """What it has done until now was our doing: to answer with its stack wakes it."""
        self.switches, self.cpu = switches(pid), cpu_seconds(pid)
