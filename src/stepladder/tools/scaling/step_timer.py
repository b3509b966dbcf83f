"""What each rank of an unmodified script does for `stepladder scale`, from within its optimizer's steps."""

from __future__ import annotations

import atexit
import sys
import time
from pathlib import Path

import numpy as np

from stepladder.core import durable
from stepladder.core.world import World
from stepladder.tools.scaling.loss import COLUMNS
from stepladder.tools.steps.clock import StepClock, has_gpu
from stepladder.tools.steps.hook import await_all

SECONDS_FOR_OTHERS = 30.0


def times_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.npz"


def short_file(folder: Path, rank: int) -> Path:
    """Of a script that ends too early: how many steps it has made."""
    return folder / f"rank-{rank}.steps"


class StepTimer(StepClock):
    """The steps of this rank: seconds in COLUMNS for each, once the warm-up is over."""

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
        """Leave the times, and end the script once all ranks are here: one that waits for another would fail."""
        file = times_file(self.folder, self.world.rank)
        times = np.array(self.rows[self.first_row :])
        if has_gpu():
            times[:, COLUMNS.index("compute") :] = np.nan
        distributed = sys.modules["torch"].distributed
        with durable.replacing(file, fsync=False) as aside, aside.open("wb") as opened:
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
            short_file(self.folder, self.world.rank).write_text(str(len(self.rows)))
