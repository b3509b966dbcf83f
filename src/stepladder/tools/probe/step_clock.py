"""Measure the optimizer steps of a user's script from inside, on one rank.

The thread that steps also runs the model's forward and backward pass on the CPU, and sleeps while
it waits for other ranks. So the time that this thread is on a core, or queued for one, is the
rank's own work, without waiting. With a GPU the thread only launches kernels: then only the
time of a step and of its data can be measured.
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

from stepladder.rank.progress import STEP_KEYS

# Seconds of one step on one rank, as that rank measured them. queued: the part of them in which the
# rank had work, but waited for a core.
COLUMNS = ("whole", *STEP_KEYS, "queued")
# Nanoseconds on a core, nanoseconds in the queue for one, number of turns on a core.
SCHEDSTAT = Path("/proc/thread-self/schedstat")
SCHEDSTAT_BYTES = 80


class RunQueue:
    """The time that the creating thread has waited for a core; a read costs microseconds."""

    def __init__(self, file: Path = SCHEDSTAT) -> None:
        self.descriptor = -1
        with suppress(OSError):
            self.descriptor = os.open(file, os.O_RDONLY)

    def seconds(self) -> float:
        """Return the seconds since the thread's start; NaN if the kernel does not report them."""
        if self.descriptor < 0:
            return math.nan
        numbers = os.pread(self.descriptor, SCHEDSTAT_BYTES, 0).split()
        return int(numbers[1]) / 1e9 if len(numbers) > 1 else math.nan


class StepClock:
    """A listener that divides the time of each step and passes it to `record_step`."""

    def __init__(self) -> None:
        self.optimizers: set[int] = set()  # the ids of those that have stepped
        self.depth = 0  # an optimizer may step another optimizer
        self.queue = RunQueue()
        self.data_s = 0.0
        self.data_work_s = 0.0
        # When the optimizer's current step started, and when its previous step ended.
        self.start = math.nan
        self.start_work = math.nan
        self.end = math.nan
        self.end_work = math.nan
        self.end_queued = math.nan
        self.watch_data_loader()

    def work_seconds(self) -> float:
        """Return the seconds that this thread has been on a core or queued for one."""
        queued = self.queue.seconds()
        return thread_time() + (0.0 if math.isnan(queued) else queued)

    def watch_data_loader(self) -> None:
        """Time each batch of every DataLoader."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter as BatchIterator

        read: Callable[[Any], Any] = BatchIterator.__next__

        def read_timed(iterator: Any) -> Any:
            start = perf_counter()
            start_work = self.work_seconds()
            try:
                return read(iterator)
            finally:
                self.data_s += perf_counter() - start
                self.data_work_s += self.work_seconds() - start_work

        BatchIterator.__next__ = read_timed  # type: ignore[assignment,method-assign]

    def before_step(self, _optimizer: object) -> None:
        self.depth += 1
        if self.depth == 1:
            self.start = perf_counter()
            self.start_work = self.work_seconds()

    def after_step(self, optimizer: object) -> None:
        self.depth -= 1
        if self.depth:
            return
        now = perf_counter()
        work = self.work_seconds()
        self.optimizers.add(id(optimizer))
        step_s = now - self.end
        update_s = now - self.start
        update_work_s = work - self.start_work
        compute_s = work - self.end_work - update_work_s - self.data_work_s
        wait_s = step_s - self.data_s - update_s - compute_s
        queued = self.queue.seconds()
        row = [step_s, self.data_s, compute_s, wait_s, update_s, queued - self.end_queued]
        self.end = now
        self.end_work = work
        self.end_queued = queued
        self.data_s = 0.0
        self.data_work_s = 0.0
        self.record_step(row)

    def record_step(self, row: list[float]) -> None:
        """Record the seconds of a step that has ended, in the order of COLUMNS.

        All are NaN for the first step, because its start was not observed.
        """
        raise NotImplementedError


def has_gpu() -> bool:
    """Return whether this process uses a GPU, so that its thread's time is not that of its work."""
    return bool(sys.modules["torch"].cuda.is_initialized())
