"""The times of a script's optimizer steps, taken from within them, on one rank, and what is kept of
them.

The thread that steps also runs forward and backward of a model on the CPU, and sleeps while it
waits for others. So its time on a core, or in the queue for one, is the rank's own work, measured
before the ranks meet. With a GPU the thread only hands work out: then the whole step and the data
are all that can be told."""

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
from stepladder.tools.steps.hook import await_all, count_file, who

# Seconds of one step on one rank, as it measured them; queued: those in which it could have
# computed, had a core been free.
COLUMNS = ("whole", *STEP_KEYS, "queued")
SECONDS_BETWEEN_LINES = 1.0
RANKS_THAT_OFTEN = (
    64  # of more, each writes less often: a day of all of them is less than a gigabyte
)
SECONDS_FOR_OTHERS = 30.0
SCHEDSTAT = Path(
    "/proc/thread-self/schedstat"
)  # nanoseconds on a core, nanoseconds in the queue for one, turns


class Queue:
    """How long the thread that makes it could have computed, but waited for a core. A look costs
    microseconds.
    """

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
        row = [
            whole,
            self.data,
            own,
            whole - self.data - updating - own,
            updating,
            queued - self.queued,
        ]
        self.queued, self.ended, self.ended_work, self.data, self.data_work = (
            queued,
            now,
            work,
            0.0,
            0.0,
        )
        self.take(row)

    def take(self, row: list[float]) -> None:
        """Seconds of the step that has ended, in COLUMNS; NaN for the first, whose beginning nobody
        saw.
        """
        raise NotImplementedError


def has_gpu() -> bool:
    """Whether this process works on one, so that its thread's time says little."""
    return bool(sys.modules["torch"].cuda.is_initialized())


class StepRecorder(StepClock):
    """Keeps this rank's steps for `run --run-dir`. A place that takes no more ends the record,
    never the training.

    One file per rank, a line about once a second: a rank that is killed loses no more. The first
    line of each start says where this rank was, the others how many steps it had made by then, and
    what the latest took."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.file = Path(folder), -1
        self.gpu = False
        self.steps = self.kept = 0
        self.sums = [0.0] * len(STEP_KEYS)
        self.flushed = 0.0

    def take(self, row: list[float]) -> None:
        self.steps += 1
        if self.steps == 1:
            self.begin()
            return
        whole, data, *rest, _queued = row
        seconds = [data, whole - data, 0.0, 0.0] if self.gpu else [data, *rest]
        self.sums = [a + b for a, b in zip(self.sums, seconds, strict=True)]
        if time.monotonic() - self.flushed >= self.pause:
            self.flush()

    def begin(self) -> None:
        """Say who this is: with the first step, when a script has opened its process group if it
        has one.
        """
        (rank, size), self.gpu = who(), has_gpu()
        self.pause = SECONDS_BETWEEN_LINES * max(1, size / RANKS_THAT_OFTEN)
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = open_for_append(self.folder / f"rank-{rank}.jsonl")
        about = {
            "host": socket.gethostname(),
            "gpu": self.gpu,
            "torch": sys.modules["torch"].__version__,
        }
        # The same on all ranks that were started together, and seldom the same again.
        start = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} {World.detect().restart_count}"
        self.write({"start": start, "world_size": size, "time": round(time.time(), 3), **about})
        self.flushed, self.kept = time.monotonic(), 1
        atexit.register(self.flush)

    def flush(self) -> None:
        if self.steps == self.kept:
            return
        seconds = {
            phase: round(second, 6) for phase, second in zip(STEP_KEYS, self.sums, strict=True)
        }
        self.write(
            {
                "step": self.steps,
                "steps": self.steps - self.kept,
                "time": round(time.time(), 3),
                **seconds,
            }
        )
        self.kept, self.sums, self.flushed = self.steps, [0.0] * len(STEP_KEYS), time.monotonic()

    def write(self, line: dict[str, Any]) -> None:
        if self.file < 0:
            return
        try:
            os.write(self.file, f"{json.dumps(line)}\n".encode())
        except OSError:
            self.file = -1


def times_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.npz"


class StepTimer(StepClock):
    """Keeps this rank's steps for `scale`: seconds in COLUMNS for each, once the warm-up is over."""

    def __init__(self, folder: str, warmup: int, steps: int) -> None:
        super().__init__()
        self.folder, self.first_row, self.last_row = Path(folder), warmup, warmup + steps
        self.world = World.detect()
        self.rows: list[list[float]] = []
        self.first_at = 0.0
        atexit.register(self.say_if_short)

    def take(self, row: list[float]) -> None:
        self.rows.append(row)
        self.first_at = self.first_at or time.time()
        if len(self.rows) == self.last_row:
            self.end()

    def end(self) -> None:
        """Leave the times, and end the script once all ranks are here: one that waits for another
        would fail.
        """
        import numpy as np  # a launcher does without

        file = times_file(self.folder, self.world.rank)
        times = np.array(self.rows[self.first_row :])
        if has_gpu():
            times[:, COLUMNS.index("compute") :] = np.nan
        distributed = sys.modules["torch"].distributed
        with durable.replace_file(file, fsync=False) as aside, aside.open("wb") as opened:
            np.savez(
                opened,
                times=times,
                first_at=self.first_at,
                optimizers=len(self.optimizers),
                together=distributed.is_available() and distributed.is_initialized(),
            )
        files = [times_file(self.folder, rank) for rank in range(self.world.world_size)]
        await_all(lambda: all(file.exists() for file in files), SECONDS_FOR_OTHERS)
        raise SystemExit(0)

    def say_if_short(self) -> None:
        if len(self.rows) < self.last_row:
            count_file(self.folder, self.world.rank).write_text(
                str(len(self.rows)), encoding="utf-8"
            )
