"""Record the times of a script's steps on one rank, for `stepladder run --run-dir`."""

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

from stepladder.core.jsonl import open_for_append
from stepladder.core.world import World
from stepladder.rank.progress import STEP_KEYS
from stepladder.tools.probe.ranks import get_rank_and_world_size
from stepladder.tools.probe.step_clock import StepClock, has_gpu

STEPS_LINE_INTERVAL_S = 1.0
# With more ranks each rank writes less often: all ranks of a day write less than a gigabyte.
RANKS_AT_FULL_RATE = 64


def _json_time() -> float:
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
                "time": _json_time(),
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
        sums = zip(STEP_KEYS, self.sums, strict=True)
        seconds = {key: round(total, 6) for key, total in sums}
        self.write({"step": self.steps, "steps": steps, "time": _json_time(), **seconds})
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
