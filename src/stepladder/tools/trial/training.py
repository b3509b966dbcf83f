"""The training of a job on one rank of a trial."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from stepladder.core.settings import Settings, TrainRequest
from stepladder.tools.probe.job_listener import JobListener
from stepladder.train.comm import Comm
from stepladder.train.job import Job, Recipe
from stepladder.train.job_runner import join_process_group
from stepladder.train.run_spec import RunSpec
from stepladder.train.train_result import TrainResult
from stepladder.train.trainer import Trainer


@dataclass(frozen=True)
class _Training:
    """A job on this rank, which a tool may change before it trains it."""

    job: Job
    settings: Settings
    recipe: Recipe
    comm: Comm

    def make_spec(self, **settings: Any) -> RunSpec:
        """Return the run with some other settings."""
        return RunSpec.make(self.job, replace(self.settings, **settings), self.recipe, self.comm)

    def fit(self, listener: JobListener | None = None) -> TrainResult:
        """Train the settings' steps."""
        self.comm.phases.observer = listener
        trainer = Trainer(self.job, self.settings, self.recipe, self.comm, repeats_pass=False)
        return trainer.fit()


@contextmanager
def open_training(request: TrainRequest) -> Iterator[_Training]:
    """Join the process group for the block, and build the job without its evaluations."""
    with join_process_group(request) as (build, recipe, comm):
        job = replace(build(), eval_data=None, best=None)
        yield _Training(job, request.settings, recipe, comm)
