"""What each rank of a job does for `stepladder profile`: the trainer's own steps, with their parts named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.rank.preemption import StopSignals
from stepladder.tools.profiler.capture import Capture
from stepladder.train.comm import pick_device, process_group
from stepladder.train.run import configured
from stepladder.train.session import Run
from stepladder.train.sync.manual import Agreed
from stepladder.train.trainer import Trainer

MARK = "stepladder:"  # and the part's name


class ProfiledTrainer(Trainer):
    """The trainer with its parts marked from outside, so that a run that is not profiled pays nothing."""

    capture: Capture

    def _prepare(self, run: Run, stop: StopSignals) -> None:
        super()._prepare(run, stop)
        self.batches = _read(self.batches)  # type: ignore[assignment]
        self.sync.backward = marked("backward", self.sync.backward)  # type: ignore[method-assign]
        self.sync.finish = marked("gradients", self.sync.finish)  # type: ignore[method-assign]
        self._update = marked("optimizer", self._update)  # type: ignore[method-assign]

    def step(self) -> None:
        self.capture.before_step()
        self.counted = False
        super().step()
        self._count()

    def _between_steps(self, agreed: Agreed) -> None:
        self._count()
        with record_function(f"{MARK}between steps"):
            super()._between_steps(agreed)

    def _count(self) -> None:
        if not self.counted:
            self.counted = True
            self.capture.after_step()


def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, as a part of this name in the trace."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        with record_function(MARK + name):
            return function(*args, **kwargs)

    return inside


def _read(batches: Any) -> Iterator[Any]:
    read = marked("data", lambda: next(batches, None))
    try:
        while (batch := read()) is not None:
            yield batch
    finally:
        batches.close()


def profile_job(
    path: Path, given: dict[str, Any], settings: Settings, folder: Path, warmup: int, steps: int
) -> int:
    """Train `warmup` steps, and `steps` more under the profiler; the trace goes to `folder`."""
    world = World.detect()
    build, settings, about = configured(path, given, settings, world)
    with process_group(world, pick_device(settings.device, world), settings.timeout) as comm:
        job = build()
        job = replace(job, loss=marked("forward", job.loss), eval_data=None, best=None)
        settings = replace(settings, steps=warmup + steps, epochs=warmup + steps)  # as many as could be needed
        trainer = ProfiledTrainer(job, settings, about, comm)
        trainer.capture = Capture(folder, world.rank, warmup, steps)
        trainer.fit()
        comm.gather_bytes(b".")  # when the first rank leaves, all traces are there
    return 0
