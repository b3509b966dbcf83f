"""What a rank of an unmodified script does for `stepladder profile`: the observer of `hook.py`."""

from __future__ import annotations

import atexit
import multiprocessing
from pathlib import Path

from stepladder.core.world import World
from stepladder.rank.lifecycle import leave
from stepladder.tools.profiler.capture import Capture, steps_file
from stepladder.tools.steps.hook import await_all

SECONDS_FOR_OTHERS = 60.0


class CapturedSteps:
    """Records a window of the first optimizer's steps, and ends the script then, for no more is asked for.

    A script's second optimizer (of a GAN) does not make a step of its own.
    """

    def __init__(self, folder: str, warmup: int, steps: int) -> None:
        self.rank, self.world_size = who()
        self.capture = Capture(Path(folder), self.rank, warmup, steps)
        self.first: object = None
        atexit.register(self.capture.say_steps)  # for a script that ends before the window does

    def before_step(self, optimizer: object) -> None:
        if self.first is None:
            self.first = optimizer
        if optimizer is self.first:
            self.capture.before_step()

    def after_step(self, optimizer: object) -> None:
        if optimizer is not self.first or not self.capture.after_step():
            return
        files = [steps_file(self.capture.folder, rank) for rank in range(self.world_size)]
        end = str(self.capture.end)
        await_all(lambda: all(file.exists() and file.read_text() == end for file in files), SECONDS_FOR_OTHERS)
        for child in multiprocessing.active_children():  # workers of a DataLoader
            child.kill()
        leave(0)


def who() -> tuple[int, int]:
    """Rank and number of ranks. A script that starts its processes itself has them in its process group alone."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    world = World.detect()
    return world.rank, world.world_size
