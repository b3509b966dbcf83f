"""What a rank of an unmodified script does for `stepladder profile`; the observer of `hook.py`."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

from stepladder.core.world import World
from stepladder.rank.lifecycle import leave
from stepladder.tools.profiler.capture import Capture, steps_file

FOLDER, WARMUP, STEPS = (f"STEPLADDER_PROFILE_{name}" for name in ("FOLDER", "WARMUP", "STEPS"))
SECONDS_FOR_OTHERS = 60.0


def variables(folder: Path, warmup: int, steps: int) -> dict[str, str]:
    """What tells a rank where its trace goes, how many steps are left out, and how many are recorded."""
    return {FOLDER: str(folder.absolute()), WARMUP: str(warmup), STEPS: str(steps)}


first: list[Any] = []  # a script's second optimizer (of a GAN) does not make a step of its own


def before_step(optimizer: Any) -> None:
    if not first:
        first.append(optimizer)
    if optimizer is first[0]:
        capture().before_step()


def after_step(optimizer: Any) -> None:
    """Ends the script at the window's end: what it does later is not asked for."""
    if optimizer is first[0] and capture().after_step():
        wait_for_the_others()
        for child in multiprocessing.active_children():  # workers of a DataLoader
            child.kill()
        leave(0)


@cache
def capture() -> Capture:
    folder, warmup, steps = (os.environ[name] for name in (FOLDER, WARMUP, STEPS))
    found = Capture(Path(folder), who()[0], int(warmup), int(steps))
    atexit.register(found.say_steps)  # for a script that ends before the window does
    return found


def who() -> tuple[int, int]:
    """Rank and number of ranks. A script that starts its processes itself has them in its process group alone."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world = World.detect()
    return world.rank, world.world_size


def wait_for_the_others() -> None:
    """A rank that left while another was still in its last collective would make that one fail."""
    mine, deadline = capture(), time.monotonic() + SECONDS_FOR_OTHERS
    files = [steps_file(mine.folder, rank) for rank in range(who()[1])]
    while time.monotonic() < deadline:
        if all(file.exists() and file.read_text() == str(mine.end) for file in files):
            return
        time.sleep(0.02)
