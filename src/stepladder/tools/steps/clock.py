"""The times of a script's optimizer steps, taken from within them, on one rank.

The thread that steps also runs forward and backward of a model on the CPU, and sleeps while it waits for others.
So its time on a core, or in the queue for one, is the rank's own work, measured before the ranks meet. With a GPU
the thread only hands work out: then the whole step and the data are all that can be told.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

from stepladder.tools.steps.run_queue import Queue


class StepClock:
    """Takes a step's time apart. optimizers: the ids of those that have stepped."""

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

    def before(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self.began, self.began_work = perf_counter(), self.work()

    def after(self, optimizer: object) -> list[float] | None:
        """Seconds of the step that ends now, as in `scaling.loss.COLUMNS`: whole, by STEP_KEYS, queued.

        NaN for the first step, whose beginning nobody saw; None inside another optimizer's step.
        """
        self.depth -= 1
        if self.depth:
            return None
        now, work = perf_counter(), self.work()
        self.optimizers.add(id(optimizer))
        whole, updating = now - self.ended, now - self.began
        own = work - self.ended_work - (work - self.began_work) - self.data_work
        queued = self.queue.seconds()
        wait = whole - self.data - updating - own
        row = [whole, self.data, own, wait, updating, queued - self.queued]
        self.queued, self.ended, self.ended_work, self.data, self.data_work = queued, now, work, 0.0, 0.0
        return row


def has_gpu() -> bool:
    """Whether this process works on one, so that its thread's time says little."""
    return bool(sys.modules["torch"].cuda.is_initialized())
