"""What each rank of a job does for `stepladder scale`: some steps, each timed before the ranks wait for others.

In a batch job it is `stepladder run -m stepladder.tools.scaling.on_ranks ASKED.json`, on every node.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from stepladder.core.exit_codes import STOPPED
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.tools.scaling.loss import COLUMNS
from stepladder.tools.scaling.measure import FIRST_STEP, TIMES
from stepladder.tools.steps.run_queue import Queue
from stepladder.train.comm import pick_device, process_group
from stepladder.train.run import configured
from stepladder.train.sync.manual import Agreed
from stepladder.train.trainer import Trainer


class TimedTrainer(Trainer):
    """A trainer that keeps what it otherwise adds up: each step's seconds, in COLUMNS.

    What comes between steps (records, snapshots) is left out.
    """

    def step(self) -> None:
        if not hasattr(self, "rows"):
            self.rows: list[list[float]] = []
            self.queue = Queue()
        self.queued = self.queue.seconds()
        self.before, self.began, self.kept = list(self.run.log.times), perf_counter(), False
        super().step()
        self._keep()
        if len(self.rows) == 1:
            self.first_step_at = time.time()

    def _between_steps(self, agreed: Agreed) -> None:
        self._keep()
        super()._between_steps(agreed)

    def _keep(self) -> None:
        if not self.kept:
            self.kept = True
            phases = zip(self.run.log.times[:4], self.before, strict=False)
            whole, queued = perf_counter() - self.began, self.queue.seconds() - self.queued
            self.rows.append([whole, *(now - before for now, before in phases), queued])


def time_steps(path: Path, given: dict[str, Any], settings: Settings, weak: bool) -> int:
    """Train settings.steps steps; rank 0 leaves all ranks' times, shape (ranks, steps, COLUMNS), and when the
    first step was done. weak: the job's global batch times the number of ranks."""
    world = World.detect()
    build, settings, about = configured(path, given, settings, world)
    assert settings.steps is not None
    batch = settings.global_batch * (world.world_size if weak else 1)
    settings = replace(settings, global_batch=batch, epochs=settings.steps)  # as many as could be needed
    with process_group(world, pick_device(settings.device, world)) as comm:
        trainer = TimedTrainer(replace(build(), eval_data=None, best=None), settings, about, comm)
        if trainer.fit()["stopped"]:
            return STOPPED
        rows = comm.gather_bytes(np.array(trainer.rows).tobytes())
    if world.is_first:
        times = np.array([np.frombuffer(part) for part in rows]).reshape(world.world_size, -1, len(COLUMNS))
        np.save(settings.run_dir / TIMES, times)
        (settings.run_dir / FIRST_STEP).write_text(json.dumps({"at": trainer.first_step_at, "batch": batch}))
    return 0


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    sys.exit(time_steps(Path(asked["path"]), asked["given"], Settings(**asked["settings"]), asked["weak"]))
