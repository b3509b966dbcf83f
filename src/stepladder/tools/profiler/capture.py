"""Record a window of optimizer steps with torch.profiler, on one rank."""

from __future__ import annotations

import atexit
import json
import math
import sys
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

from stepladder.core.process_count import count_cores
from stepladder.tools.probe.job_listener import JobListener
from stepladder.tools.probe.ranks import end_script_after, get_rank_and_world_size, write_step_count
from stepladder.tools.probe.step_clock import RunQueue

METADATA_KEY = "stepladder"  # of the rank's description in the trace, next to torch's own keys
MARK_PREFIX = "stepladder:"  # of a job's phase, before the phase's name


def _peak_memory_bytes() -> int:
    import resource  # late: Windows has none

    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


class Capture(JobListener):
    """Skips `warmup` optimizer steps, records `steps` more, and writes the trace to `folder`.

    The file has the name that TensorBoard's profiler plug-in expects; its METADATA_KEY has the
    rank, its peak memory, its threads and cores, and the time that each step waited for a core.
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

        self.folder = folder
        self.rank = rank
        self.warmup = warmup
        self.last_step = warmup + steps
        self.finished_steps = 0
        self.peak_bytes: int | None = None
        self.queue = RunQueue()
        self.queued_s: list[float] = []  # before each recorded step, and after the last
        self.record_function = record_function
        self.on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=tensorboard_trace_handler(str(folder), worker_name=f"rank-{rank}"),
            acc_events=True,
        )

    def before_step(self) -> None:
        # The profiler's own first step costs more than the others: it is the last of the warm-up.
        if self.finished_steps + 1 == self.warmup:
            self.peak_bytes = _peak_memory_bytes()  # before the profiler allocates its buffers
            self.profiler.start()

    def after_step(self) -> bool:
        """Return whether the window has ended, so that the trace is complete."""
        self.finished_steps += 1
        is_over = self.finished_steps == self.last_step
        if self.warmup <= self.finished_steps <= self.last_step:
            self.queued_s.append(self.queue.seconds())
        if is_over:
            self.add_metadata()
        if self.warmup <= self.finished_steps <= self.last_step:
            self.profiler.step()
        if is_over:
            self.profiler.stop()
            self.write_step_count()
        return is_over

    def add_metadata(self) -> None:
        torch = sys.modules["torch"]
        metadata = {
            "rank": self.rank,
            "peak_bytes": self.peak_bytes,
            "peak_gpu_bytes": None,
            "cores": count_cores(),
            "threads": torch.get_num_threads(),
            "queued_s": None,  # the kernel does not tell
        }
        if self.on_gpu:
            metadata["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
        if not math.isnan(self.queued_s[0]):
            metadata["queued_s"] = [end - begin for begin, end in pairwise(self.queued_s)]
        self.profiler.add_metadata_json(METADATA_KEY, json.dumps(metadata))

    def observe_part(self, mark: str) -> AbstractContextManager[object]:
        """Mark a job's phase in the trace."""
        return self.record_function(MARK_PREFIX + mark)

    def write_step_count(self) -> None:
        """Write the number of finished steps, once: a write in each step would be in the trace."""
        write_step_count(self.folder, self.rank, self.finished_steps)


class CapturedSteps:
    """A listener that records a window of the first optimizer's steps, then ends the script.

    A script's second optimizer (of a GAN) does not count steps.
    """

    def __init__(self, folder: str, warmup: int, steps: int) -> None:
        rank, self.world_size = get_rank_and_world_size()
        self.capture = Capture(Path(folder), rank, warmup, steps)
        self.first_optimizer: object = None
        atexit.register(self.capture.write_step_count)  # if the script ends within the window

    def before_step(self, optimizer: object) -> None:
        if self.first_optimizer is None:
            self.first_optimizer = optimizer
        if optimizer is self.first_optimizer:
            self.capture.before_step()

    def after_step(self, optimizer: object) -> None:
        if optimizer is not self.first_optimizer:
            return
        if self.capture.after_step():
            end_script_after(self.capture.folder, self.world_size, self.capture.last_step)
