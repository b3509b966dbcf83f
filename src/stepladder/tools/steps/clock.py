"""The times of a script's optimizer steps, taken from within them, on one rank.

The thread that steps also runs forward and backward of a model on the CPU, and sleeps while it waits for others.
So its time on a core, or in the queue for one, is the rank's own work, measured before the ranks meet. With a GPU
the thread only hands work out: then the whole step and the data are all that can be told.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

SCHEDSTAT = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, nanoseconds in the queue for one, turns


class Queue:
    """How long the thread that makes it could have computed, but waited for a core. A look costs microseconds."""

    def __init__(self, file: Path = SCHEDSTAT) -> None:
        self.file = -1
        with suppress(OSError):
            self.file = os.open(file, os.O_RDONLY)

    def seconds(self) -> float:
        """Since the thread's start; NaN where the kernel does not say it."""
        words = os.pread(self.file, 80, 0).split() if self.file >= 0 else []
        return int(words[1]) / 1e9 if len(words) > 1 else math.nan


class StepClock:
    """An observer (see `hook.py`) that takes each step's time apart, for `take` to keep.

    optimizers: the ids of those that have stepped.
    """

    def __init__(self) -> None:
        self.optimizers: set[int] = set()
        self.depth = 0  # an optimizer may step another one
        self.queue = Queue()
        self.data = self.data_work = 0.0
        self.ended = self.ended_work = self.queued = math.nan
        self.watch_data()

    def work(self) -> float:
        """Seconds that this thread has been on a core, or has waited for one."""
        queued = self.queue.seconds()
        return thread_time() + (0.0 if math.isnan(queued) else queued)

    def watch_data(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter as Batches

        read: Callable[[Any], Any] = Batches.__next__

        def timed(batches: Any) -> Any:
            began, work = perf_counter(), self.work()
            try:
                return read(batches)
            finally:
                self.data += perf_counter() - began
                self.data_work += self.work() - work

        Batches.__next__ = timed  # type: ignore[assignment,method-assign]

    def before_step(self, _optimizer: object) -> None:
        self.depth += 1
        if self.depth == 1:
            self.began, self.began_work = perf_counter(), self.work()

    def after_step(self, optimizer: object) -> None:
        self.depth -= 1
        if self.depth:
            return
        now, work = perf_counter(), self.work()
        self.optimizers.add(id(optimizer))
        whole, updating = now - self.ended, now - self.began
        own = work - self.ended_work - (work - self.began_work) - self.data_work
        queued = self.queue.seconds()
        row = [whole, self.data, own, whole - self.data - updating - own, updating, queued - self.queued]
        self.queued, self.ended, self.ended_work, self.data, self.data_work = queued, now, work, 0.0, 0.0
        self.take(row)

    def take(self, row: list[float]) -> None:
        """Seconds of the step that has ended, as in `scaling.loss.COLUMNS`: whole, by STEP_KEYS, queued.

        NaN for the first step, whose beginning nobody saw.
        """
        raise NotImplementedError


def has_gpu() -> bool:
    """Whether this process works on one, so that its thread's time says little."""
    return bool(sys.modules["torch"].cuda.is_initialized())
