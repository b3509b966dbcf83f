"""What each rank of an unmodified script does for `stepladder run --run-dir`: it keeps the times of its steps.

One file per rank, a line about once a second: a rank that is killed loses no more. The first line of each start
says where this rank was, the others how many steps it had made by then, and what the latest of them took.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepladder.core.world import World
from stepladder.rank.progress import STEP_KEYS
from stepladder.tools.steps.clock import StepClock, has_gpu
from stepladder.tools.steps.hook import who

SECONDS_BETWEEN_LINES = 1.0


def steps_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


class StepRecorder(StepClock):
    """This rank's steps. A place that takes no more ends the record, never the training."""

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
        if time.monotonic() - self.flushed >= SECONDS_BETWEEN_LINES:
            self.flush()

    def begin(self) -> None:
        """Say who this is: with the first step, when a script has opened its process group if it has one."""
        (rank, size), self.gpu = who(), has_gpu()
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = os.open(steps_file(self.folder, rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        about = {"host": socket.gethostname(), "gpu": self.gpu, "torch": sys.modules["torch"].__version__}
        # The same on all ranks that were started together, and seldom the same again.
        start = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} {World.detect().restart_count}"
        self.write({"start": start, "world_size": size, "time": round(time.time(), 3), **about})
        self.flushed, self.kept = time.monotonic(), 1
        atexit.register(self.flush)

    def flush(self) -> None:
        if self.steps == self.kept:
            return
        seconds = {phase: round(second, 6) for phase, second in zip(STEP_KEYS, self.sums, strict=True)}
        self.write({"step": self.steps, "steps": self.steps - self.kept, "time": round(time.time(), 3), **seconds})
        self.kept, self.sums, self.flushed = self.steps, [0.0] * len(STEP_KEYS), time.monotonic()

    def write(self, line: dict[str, Any]) -> None:
        if self.file < 0:
            return
        try:
            os.write(self.file, f"{json.dumps(line)}\n".encode())
        except OSError:
            self.file = -1
