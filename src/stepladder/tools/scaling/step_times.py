"""Time the steps of a job on each rank, for `stepladder scale`.

A batch job runs it on every node as `stepladder run -m stepladder.tools.scaling.step_times FILE`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from stepladder.core.errors import DONE, STOPPED, InputError
from stepladder.core.settings import Settings, TrainRequest
from stepladder.tools.probe.job_listener import JobListener
from stepladder.tools.probe.step_clock import COLUMNS, RunQueue
from stepladder.tools.scaling.efficiency import TIMES_FILE
from stepladder.train.phases import Phases

MIN_MEASURED_STEPS = 5


class _StepTimes(JobListener):
    """Records the seconds of each step of a training, in COLUMNS.

    Work between steps (records, snapshots) is not part of a step.
    """

    def __init__(self, phases: Phases) -> None:
        self.phases = phases
        self.queue = RunQueue()
        self.rows: list[list[float]] = []
        self.first_at = 0.0  # when the first step has ended
        self.before = self.read_clocks()

    def read_clocks(self) -> list[float]:
        # The phases after the first four are not part of COLUMNS.
        return [perf_counter(), *self.phases.seconds[:4], self.queue.seconds()]

    def before_step(self) -> None:
        self.before = self.read_clocks()

    def after_step(self) -> None:
        pairs = zip(self.read_clocks(), self.before, strict=True)
        self.rows.append([after - before for after, before in pairs])
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
    from stepladder.tools.trial.training import open_training
    from stepladder.train.run_spec import resolve_sizes

    requested_steps = request.settings.steps
    assert requested_steps is not None
    with open_training(request) as training:
        world = training.comm.world
        batch = resolve_sizes(training.settings, training.recipe).global_batch
        if weak:
            batch *= world.world_size
        steps = requested_steps
        if training.job.schedule is not None:
            steps = _limit_steps(training.make_spec(steps=None).num_steps, steps, warmup)
        settings = replace(training.settings, steps=steps, global_batch=None, epochs=None)
        # An epoch has at least one step, so these epochs are enough.
        recipe = training.recipe.with_sizes(global_batch=batch, epochs=requested_steps)
        listener = _StepTimes(training.comm.phases)
        if replace(training, settings=settings, recipe=recipe).fit(listener).stopped:
            return STOPPED
        rows = training.comm.gather_bytes(np.array(listener.rows).tobytes())
    if world.is_first:
        times = np.array([np.frombuffer(row) for row in rows])
        times = times.reshape(world.world_size, -1, len(COLUMNS))
        file = settings.run_dir / TIMES_FILE
        np.savez(file, times=times, first_at=listener.first_at, batch=batch)
    return DONE


def _limit_steps(schedule_steps: int, requested_steps: int, warmup: int) -> int:
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
