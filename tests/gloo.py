"""Gloo's threads at their slowest: what a busy machine does to them once in a hundred runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


@contextmanager
def gloo_comes_last() -> Iterator[None]:
    """Processes started meanwhile share one core, where gloo's threads are behind all others."""
    over = threading.Event()
    lowered = set()

    def lower_priorities() -> None:
        for process in psutil.Process().children(recursive=True):
            for name in Path(f"/proc/{process.pid}/task").glob("*/comm"):
                thread = int(name.parent.name)
                with suppress(OSError):  # one that has just ended: the others are still to be found
                    if thread not in lowered and "gloo" in name.read_text():
                        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                        lowered.add(thread)

    def keep_looking() -> None:
        while not over.wait(0.01):
            with suppress(OSError, psutil.NoSuchProcess):
                lower_priorities()

    watcher = threading.Thread(target=keep_looking)
    watcher.start()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        over.set()
        watcher.join()
    assert len(lowered) >= 4, f"each of two ranks has two such threads or more, seen were {lowered}"
