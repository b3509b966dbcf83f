"""What each rank of a job does for `stepladder scale`: some steps, each timed before the ranks wait
for others.

In a batch job it is `stepladder run -m stepladder.tools.scaling.on_ranks ASKED.json`, on every
node."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from stepladder.core.errors import DONE, STOPPED, InputError
from stepladder.core.settings import Settings, TrainRequest
from stepladder.tools.scaling.loss import TIMES
from stepladder.tools.steps.clock import COLUMNS, Queue
from stepladder.train.phases import STEPPING, Phases

LEAST_STEPS = 5  # to measure


class StepTimes:
    """An observer of phases that keeps each step's seconds in COLUMNS, shape (steps, columns).

    What comes between steps (records, snapshots) is left out.
    """

    def __init__(self, phases: Phases) -> None:
        self.phases, self.queue = phases, Queue()
        self.rows: list[list[float]] = []
        self.first_at = 0.0

    def __call__(self, mark: str) -> AbstractContextManager[Any]:
        return self._step() if mark == STEPPING.mark else nullcontext()

    @contextmanager
    def _step(self) -> Iterator[None]:
        queued, before, began = self.queue.seconds(), list(self.phases.seconds), perf_counter()
        yield
        whole, parts = perf_counter() - began, zip(self.phases.seconds[:4], before, strict=False)
        self.rows.append(
            [whole, *(now - then for now, then in parts), self.queue.seconds() - queued]
        )
        self.first_at = self.first_at or time.time()


def time_steps(request: TrainRequest, weak: bool, warmup: int) -> int:
    """Train as many steps as the settings say, and no more than the job's schedule is made for.

    Rank 0 leaves all ranks' times, shape (ranks, steps, COLUMNS), and when the first step was done.

    Args:
        request: The job, and how many steps to train.
        weak: Whether the global batch is the job's own times the number of ranks.
        warmup: How many of the steps are not measured.

    Returns:
        The exit code.

    Raises:
        InputError: The job has a schedule, and too few steps.
    """
    from stepladder.train.job_runner import (
        join_process_group,  # torch, which the launcher does without
    )
    from stepladder.train.run_spec import RunSpec, resolve_sizes
    from stepladder.train.trainer import Trainer

    settings = request.settings
    assert settings.steps is not None
    with join_process_group(request) as (build, own_recipe, comm):
        world = comm.world
        batch = resolve_sizes(settings, own_recipe).global_batch * (world.world_size if weak else 1)
        recipe = own_recipe.with_sizes(
            global_batch=batch, epochs=settings.steps
        )  # as many as could be needed
        job = replace(build(), eval_data=None, best=None)
        if job.schedule is not None:
            own_spec = RunSpec.make(job, replace(settings, steps=None), own_recipe, comm)
            settings = replace(
                settings, steps=steps_within(own_spec.num_steps, settings.steps, warmup)
            )
        settings = replace(settings, global_batch=None, epochs=None)
        comm.phases.observer = own = StepTimes(comm.phases)
        if Trainer(job, settings, recipe, comm).fit().stopped:
            return STOPPED
        rows = comm.gather_bytes(np.array(own.rows).tobytes())
    if world.is_first:
        times = np.array([np.frombuffer(part) for part in rows]).reshape(
            world.world_size, -1, len(COLUMNS)
        )
        np.savez(settings.run_dir / TIMES, times=times, first_at=own.first_at, batch=batch)
    return DONE


def steps_within(own: int, asked: int, warmup: int) -> int:
    """Return how many of the steps that are asked for the job's schedule has. Raises InputError for
    too few.
    """
    if own < min(asked, warmup + LEAST_STEPS):
        raise InputError(
            f"the job's schedule ends after {own} steps: --warmup {warmup} leaves fewer than {LEAST_STEPS}",
            f"--warmup {own - LEAST_STEPS}"
            if own > LEAST_STEPS
            else "a larger default for epochs in the Config",
        )
    return min(own, asked)


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_bytes())
    settings = Settings(**asked["settings"])
    request = TrainRequest(Path(asked["job"]), asked["config"], settings)
    sys.exit(time_steps(request, asked["weak"], asked["warmup"]))
