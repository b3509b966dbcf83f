"""Processes that a command has left running: the kernel gives them to us when their parents are
gone.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from processes import SECONDS

PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def reaping() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


OURS: set[int | None] = set()  # processes that stay: those that were there, and the one that forks


def below() -> list[psutil.Process]:
    alive = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.pid in OURS:
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            else:
                alive.append(process)
    return alive


def remaining() -> list[str]:
    """What goes on although its command has ended; it is ended."""
    deadline = time.monotonic() + 15  # what ends by itself may take its time on a busy machine
    while (leftovers := below()) and time.monotonic() < deadline:
        time.sleep(0.02)
    names = []
    for process in leftovers:
        with suppress(psutil.NoSuchProcess):
            names.append(" ".join(process.cmdline())[:100])
    end(leftovers)
    return names


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, SECONDS)
    below()
