"""What each rank of a job does for `stepladder profile`: the trainer's own steps, with their phases marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from torch.profiler import record_function

from stepladder.core.settings import TrainRequest
from stepladder.tools.profiler.capture import Capture
from stepladder.train.phases import STEPPING, Observer
from stepladder.train.run import meeting
from stepladder.train.trainer import Trainer

MARK = "stepladder:"  # and the phase's name


def marking(capture: Capture) -> Observer:
    """An observer of phases: each is a mark in the trace, and a step is one of the capture's."""

    @contextmanager
    def step() -> Iterator[None]:
        capture.before_step()
        yield
        capture.after_step()

    def observe(mark: str) -> AbstractContextManager[object]:
        return step() if mark == STEPPING.mark else record_function(MARK + mark)

    return observe


def profile_job(request: TrainRequest, folder: Path, warmup: int, steps: int) -> int:
    """Train `warmup` steps, and `steps` more under the profiler; the trace goes to `folder`."""
    settings = replace(request.settings, steps=warmup + steps, epochs=None)
    with meeting(request) as (build, recipe, comm):
        comm.phases.observer = marking(Capture(folder, comm.world.rank, warmup, steps))
        recipe = recipe.sized(epochs=warmup + steps)  # as many as could be needed
        job = replace(build(), eval_data=None, best=None)
        Trainer(job, settings, recipe, comm).fit()
        comm.gather_bytes(b".")  # when the first rank leaves, all traces are there
    return 0
