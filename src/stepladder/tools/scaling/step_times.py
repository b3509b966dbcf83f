"""Time the steps of a job on each rank, for `stepladder scale`.

A batch job runs it on every node as `stepladder run -m stepladder.tools.scaling.step_times FILE`.
"""

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
from stepladder.tools.probe.step_clock import COLUMNS, RunQueue
from stepladder.tools.scaling.efficiency import TIMES_FILE
from stepladder.train.phases import STEPPING, Phases

MIN_MEASURED_STEPS = 5


class StepTimes:
    """Observes the phases of a training and records the seconds of each step, in COLUMNS.

    Work between steps (records, snapshots) is not part of a step.
    """

    def __init__(self, phases: Phases) -> None:
        self.phases = phases
        self.queue = RunQueue()
        self.rows: list[list[float]] = []
        self.first_at = 0.0  # when the first step has ended

    def __call__(self, mark: str) -> AbstractContextManager[Any]:
        return self._time_step() if mark == STEPPING.mark else nullcontext()

    @contextmanager
    def _time_step(self) -> Iterator[None]:
        queued_before = self.queue.seconds()
        phases_before = list(self.phases.seconds)
        start = perf_counter()
        yield
        total = perf_counter() - start
        # The phases after the first four are not part of COLUMNS.
        pairs = zip(self.phases.seconds[:4], phases_before, strict=False)
        phases = [after - before for after, before in pairs]
        self.rows.append([total, *phases, self.queue.seconds() - queued_before])
        self.first_at = self.first_at or time.time()


def time_steps(request: TrainRequest, weak: bool, warmup: int) -> int:
    """Train the settings' number of steps, or as many as the job's schedule has.

    Rank 0 writes TIMES_FILE: the times of all ranks, shape (ranks, steps, COLUMNS), and when the
    first step has ended.

    Args:
        request: The job, and how many steps to train.
        weak: Whether the global batch is the job's own times the number of ranks.
        warmup: How many of the steps are not measured.

    Returns:
        The exit code.

    Raises:
        InputError: The job has a schedule, and too few steps.
    """
    # Late imports: the launcher imports this module, and does without torch.
    from stepladder.train.job_runner import join_process_group
    from stepladder.train.run_spec import RunSpec, resolve_sizes
    from stepladder.train.trainer import Trainer

    settings = request.settings
    assert settings.steps is not None
    with join_process_group(request) as (build, job_recipe, comm):
        world = comm.world
        batch = resolve_sizes(settings, job_recipe).global_batch
        if weak:
            batch *= world.world_size
        # An epoch has at least one step, so these epochs are enough.
        recipe = job_recipe.with_sizes(global_batch=batch, epochs=settings.steps)
        job = replace(build(), eval_data=None, best=None)
        if job.schedule is not None:
            spec = RunSpec.make(job, replace(settings, steps=None), job_recipe, comm)
            steps = limit_steps(spec.num_steps, settings.steps, warmup)
            settings = replace(settings, steps=steps)
        settings = replace(settings, global_batch=None, epochs=None)
        step_times = StepTimes(comm.phases)
        comm.phases.observer = step_times
        if Trainer(job, settings, recipe, comm).fit().stopped:
            return STOPPED
        rows = comm.gather_bytes(np.array(step_times.rows).tobytes())
    if world.is_first:
        times = np.array([np.frombuffer(row) for row in rows])
        times = times.reshape(world.world_size, -1, len(COLUMNS))
        file = settings.run_dir / TIMES_FILE
        np.savez(file, times=times, first_at=step_times.first_at, batch=batch)
    return DONE


def limit_steps(schedule_steps: int, requested_steps: int, warmup: int) -> int:
    """Return the requested steps, or the schedule's if fewer; raise InputError for too few."""
    if schedule_steps < min(requested_steps, warmup + MIN_MEASURED_STEPS):
        hint = "a larger default for epochs in the Config"
        if schedule_steps > MIN_MEASURED_STEPS:
            hint = f"--warmup {schedule_steps - MIN_MEASURED_STEPS}"
        raise InputError(
            f"the job's schedule ends after {schedule_steps} steps: --warmup {warmup} leaves fewer"
            f" than {MIN_MEASURED_STEPS}",
            hint,
        )
    return min(schedule_steps, requested_steps)


def main(file: Path) -> int:
    """Time the steps that a file of TimedJob.make_command describes."""
    content = json.loads(file.read_bytes())
    settings = Settings(**content["settings"])
    request = TrainRequest(Path(content["job"]), content["config"], settings)
    return time_steps(request, content["weak"], content["warmup"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
