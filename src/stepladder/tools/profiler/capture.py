"""A window of optimizer steps under torch.profiler, on one rank; an observer gives it a script's steps."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from stepladder.rank.lifecycle import exit_now
from stepladder.tools.steps.hook import await_all, count_file, who
from stepladder.train.phases import STEPPING

ABOUT = "stepladder"  # what the trace says of its rank, beside torch's own keys
MARK = "stepladder:"  # and the name of a job's phase
SECONDS_FOR_OTHERS = 60.0


class Capture:
    """Lets `warmup` optimizer steps pass, records `steps` more, and leaves the trace in `folder`.

    The file is named as TensorBoard's profiler plug-in wants it; ABOUT in it holds rank and memory.
    """

    def __init__(self, folder: Path, rank: int, warmup: int, steps: int) -> None:
        import torch
        from torch.profiler import (
            ProfilerActivity,
            profile,
            record_function,
            schedule,
            tensorboard_trace_handler,
        )

        self.folder, self.rank, self.warmup, self.end = folder, rank, warmup, warmup + steps
        self.done, self.record_function = 0, record_function
        self.on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.on_gpu],
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=tensorboard_trace_handler(str(folder), worker_name=f"rank-{rank}"),
            acc_events=True,
        )

    def before_step(self) -> None:
        """The profiler's own first step, which costs more than the others, is the last of the warm-up."""
        if self.done + 1 == self.warmup:
            import resource  # late: Windows has none

            # So far, for the profiler's buffers are not the job's; getrusage(2): kilobytes, on macOS bytes.
            unit = 1 if sys.platform == "darwin" else 1024
            self.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            self.profiler.start()

    def after_step(self) -> bool:
        """True when the window has ended, and the trace is whole."""
        self.done += 1
        is_over = self.done == self.end
        if is_over:
            gpu = sys.modules["torch"].cuda.max_memory_allocated() if self.on_gpu else None
            about = {"rank": self.rank, "peak_bytes": self.memory, "peak_gpu_bytes": gpu}
            self.profiler.add_metadata_json(ABOUT, json.dumps(about))
        if self.warmup <= self.done <= self.end:
            self.profiler.step()
        if is_over:
            self.profiler.stop()
            self.say_steps()
        return is_over

    def observe(self, mark: str) -> AbstractContextManager[object]:
        """Of a job's phases: each is a mark in the trace, and a whole step is one of the window's."""
        return self._step() if mark == STEPPING.mark else self.record_function(MARK + mark)

    @contextmanager
    def _step(self) -> Iterator[None]:
        self.before_step()
        yield
        self.after_step()

    def say_steps(self) -> None:
        """How many have been made; not in each, for a file that is written in the window would be seen in it."""
        count_file(self.folder, self.rank).write_text(str(self.done), encoding="utf-8")


class CapturedSteps:
    """Records a window of the first optimizer's steps, and ends the script then, for no more is asked for.

    A script's second optimizer (of a GAN) does not make a step of its own.
    """

    def __init__(self, folder: str, warmup: int, steps: int) -> None:
        rank, self.world_size = who()
        self.capture = Capture(Path(folder), rank, warmup, steps)
        self.first: object = None
        atexit.register(self.capture.say_steps)  # for a script that ends before the window does

    def before_step(self, optimizer: object) -> None:
        if self.first is None:
            self.first = optimizer
        if optimizer is self.first:
            self.capture.before_step()

    def after_step(self, optimizer: object) -> None:
        if optimizer is not self.first or not self.capture.after_step():
            return
        files = [count_file(self.capture.folder, rank) for rank in range(self.world_size)]
        end = str(self.capture.end).encode()
        await_all(
            lambda: all(file.exists() and file.read_bytes() == end for file in files),
            SECONDS_FOR_OTHERS,
        )
        for child in multiprocessing.active_children():  # workers of a DataLoader
            child.kill()
        exit_now(0)
