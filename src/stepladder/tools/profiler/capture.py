"""A window of optimizer steps under torch.profiler, on one rank."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

ABOUT = "stepladder"  # what the trace says of its rank, beside torch's own keys


class Capture:
    """Lets `warmup` optimizer steps pass, records `steps` more, and leaves the trace in `folder`.

    The file is named as TensorBoard's profiler plug-in wants it; ABOUT in it holds rank and memory.
    """

    def __init__(self, folder: Path, rank: int, warmup: int, steps: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

        self.folder, self.rank, self.warmup, self.end = folder, rank, warmup, warmup + steps
        self.done = 0
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
            self.memory = peak_memory()  # the profiler's buffers are not the job's
            self.profiler.start()

    def after_step(self) -> bool:
        """True when the window has ended, and the trace is whole."""
        self.done += 1
        if self.done == self.end:
            self.profiler.add_metadata_json(ABOUT, json.dumps({"rank": self.rank, **self._memory()}))
        if self.warmup <= self.done <= self.end:
            self.profiler.step()
        if self.done == self.end:
            self.profiler.stop()
            self.say_steps()
        return self.done == self.end

    def say_steps(self) -> None:
        """How many have been made; not in each, for a file that is written in the window would be seen in it."""
        steps_file(self.folder, self.rank).write_text(str(self.done))

    def _memory(self) -> dict[str, int | None]:
        gpu = sys.modules["torch"].cuda.max_memory_allocated() if self.on_gpu else None
        return {"peak_bytes": self.memory, "peak_gpu_bytes": gpu}


def steps_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.steps"


def peak_memory() -> int:
    """This process's largest resident set so far, in bytes; what it shares with others counts in full."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes, on macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
