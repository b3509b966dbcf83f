"""Time the steps of an unmodified script from inside, for `stepladder scale`."""

from __future__ import annotations

import atexit
import sys
import time
from pathlib import Path

from stepladder.core import durable
from stepladder.tools.probe.ranks import end_script_after, get_rank_and_world_size, write_step_count
from stepladder.tools.probe.step_clock import COLUMNS, StepClock, has_gpu


def times_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.npz"


class StepTimer(StepClock):
    """Records seconds in COLUMNS for each step after the warm-up, then ends the script."""

    def __init__(self, folder: str, warmup: int, steps: int) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.warmup = warmup
        self.last_step = warmup + steps
        self.rank, self.world_size = get_rank_and_world_size()
        self.rows: list[list[float]] = []
        self.first_step_time = 0.0
        atexit.register(self.write_step_count)  # if the script ends before the last step

    def record_step(self, row: list[float]) -> None:
        self.rows.append(row)
        self.first_step_time = self.first_step_time or time.time()
        if len(self.rows) == self.last_step:
            self.write_times()
            self.write_step_count()
            end_script_after(self.folder, self.world_size, self.last_step)

    def write_times(self) -> None:
        import numpy as np  # late: a launcher works without numpy

        times = np.array(self.rows[self.warmup :])
        if has_gpu():
            times[:, COLUMNS.index("compute") :] = np.nan
        distributed = sys.modules["torch"].distributed
        path = times_path(self.folder, self.rank)
        with durable.replace_file(path, fsync=False) as temporary, temporary.open("wb") as file:
            np.savez(
                file,
                times=times,
                first_at=self.first_step_time,
                optimizers=len(self.optimizers),
                together=distributed.is_available() and distributed.is_initialized(),
            )

    def write_step_count(self) -> None:
        write_step_count(self.folder, self.rank, len(self.rows))
