"""Measure the optimizer steps of a user's script from inside, on one rank, and record the times.

The thread that steps also runs the model's forward and backward pass on the CPU, and sleeps while
it waits for other ranks. So the time that this thread is on a core, or queued for one, is the
rank's own work, without waiting. With a GPU the thread only launches kernels: then only the
time of a step and of its data can be measured.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

from stepladder.core import durable
from stepladder.core.jsonl import open_for_append
from stepladder.core.world import World
from stepladder.rank.progress import STEP_KEYS
from stepladder.tools.steps.hook import get_rank_and_world_size, step_count_path, wait_for_all

# Seconds of one step on one rank, as that rank measured them. queued: the part of them in which the
# rank had work, but waited for a core.
COLUMNS = ("whole", *STEP_KEYS, "queued")
STEPS_LINE_INTERVAL_S = 1.0
# With more ranks each rank writes less often: all ranks of a day write less than a gigabyte.
RANKS_AT_FULL_RATE = 64
TIMES_TIMEOUT_S = 30.0
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
    """A `StepObserver` that divides the time of each step and passes it to `record_step`."""

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


def json_time() -> float:
    return round(time.time(), 3)


class StepRecorder(StepClock):
    """Records this rank's steps for `run --run-dir`; a write error ends the record, not the run.

    Each rank has a file of its own, and writes about a line a second: a rank that is killed loses
    no more than that. The first line of each start describes the rank; each later line has the
    number of steps so far, and the seconds of the steps since the line before.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.descriptor = -1
        self.has_gpu = False
        self.interval_s = STEPS_LINE_INTERVAL_S
        self.steps = 0
        self.written_steps = 0
        self.sums = [0.0] * len(STEP_KEYS)
        self.last_write = 0.0

    def record_step(self, row: list[float]) -> None:
        self.steps += 1
        if self.steps == 1:
            self.begin()
            return
        step_s, data_s, compute_s, wait_s, update_s, _queued = row
        if self.has_gpu:
            seconds = [data_s, step_s - data_s, 0.0, 0.0]
        else:
            seconds = [data_s, compute_s, wait_s, update_s]
        self.sums = [a + b for a, b in zip(self.sums, seconds, strict=True)]
        if time.monotonic() - self.last_write >= self.interval_s:
            self.flush()

    def begin(self) -> None:
        """Open the file and write this rank's first line.

        This is done in the first step, because a script has opened its process group by then.
        """
        rank, world_size = get_rank_and_world_size()
        self.has_gpu = has_gpu()
        self.interval_s = STEPS_LINE_INTERVAL_S * max(1, world_size / RANKS_AT_FULL_RATE)
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.descriptor = open_for_append(self.folder / f"rank-{rank}.jsonl")
        # The same on all ranks that were started together, and hardly ever the same again.
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self.write(
            {
                "start": f"{address} {World.detect().restart_count}",
                "world_size": world_size,
                "time": json_time(),
                "host": socket.gethostname(),
                "gpu": self.has_gpu,
                "torch": sys.modules["torch"].__version__,
            }
        )
        self.last_write = time.monotonic()
        self.written_steps = 1
        atexit.register(self.flush)

    def flush(self) -> None:
        """Write a line for the steps since the line before."""
        steps = self.steps - self.written_steps
        if steps == 0:
            return
        seconds = {key: round(total, 6) for key, total in zip(STEP_KEYS, self.sums, strict=True)}
        self.write({"step": self.steps, "steps": steps, "time": json_time(), **seconds})
        self.written_steps = self.steps
        self.sums = [0.0] * len(STEP_KEYS)
        self.last_write = time.monotonic()

    def write(self, line: dict[str, Any]) -> None:
        if self.descriptor < 0:
            return
        try:
            os.write(self.descriptor, f"{json.dumps(line)}\n".encode())
        except OSError:
            self.descriptor = -1


def times_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.npz"


class StepTimer(StepClock):
    """Records this rank's steps for `scale`: seconds in COLUMNS for each step after the warm-up."""

    def __init__(self, folder: str, warmup: int, steps: int) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.warmup = warmup
        self.last_step = warmup + steps
        self.world = World.detect()
        self.rows: list[list[float]] = []
        self.first_step_time = 0.0
        atexit.register(self.write_count_if_short)

    def record_step(self, row: list[float]) -> None:
        self.rows.append(row)
        self.first_step_time = self.first_step_time or time.time()
        if len(self.rows) == self.last_step:
            self.write_times()
            self.exit_with_all_ranks()

    def write_times(self) -> None:
        import numpy as np  # late: a launcher works without numpy

        times = np.array(self.rows[self.warmup :])
        if has_gpu():
            times[:, COLUMNS.index("compute") :] = np.nan
        distributed = sys.modules["torch"].distributed
        path = times_path(self.folder, self.world.rank)
        with durable.replace_file(path, fsync=False) as temporary, temporary.open("wb") as file:
            np.savez(
                file,
                times=times,
                first_at=self.first_step_time,
                optimizers=len(self.optimizers),
                together=distributed.is_available() and distributed.is_initialized(),
            )

    def exit_with_all_ranks(self) -> None:
        """End the script once all ranks have written their times.

        A rank that is still in a collective would fail if another rank ended before.
        """
        paths = [times_path(self.folder, rank) for rank in range(self.world.world_size)]
        wait_for_all(lambda: all(path.exists() for path in paths), TIMES_TIMEOUT_S)
        raise SystemExit(0)

    def write_count_if_short(self) -> None:
        """Write the number of steps if the script ends before the last step to record."""
        count = len(self.rows)
        if count < self.last_step:
            path = step_count_path(self.folder, self.world.rank)
            path.write_text(str(count), encoding="utf-8")
