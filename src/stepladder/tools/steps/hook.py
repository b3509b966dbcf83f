"""Looking at a script's optimizer steps from the outside: no edit, no import, no wrapper in the
script.

The launcher puts the folder `startup` on the ranks' PYTHONPATH. Its `sitecustomize` is run by each
interpreter at its start, and calls `attach` when torch's optimizers are imported, which registers
torch's own global hooks. Nothing of it is there for ranks that nobody observes."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

from stepladder.core.world import World
from stepladder.rank.torch_fixes import wait_for_gloo

STARTUP = Path(__file__).parent / "startup"
OBSERVER = "STEPLADDER_OBSERVER"


class StepObserver(Protocol):
    """What a rank makes at its first optimizer step, and calls before and after each."""

    def before_step(self, optimizer: object) -> None: ...

    def after_step(self, optimizer: object) -> None: ...


def variables(observer: type[StepObserver], **arguments: object) -> dict[str, str]:
    """What the environment of ranks must say so that each makes `observer(**arguments)`, with paths
    as text.
    """
    path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH", "")]))
    about = {"module": observer.__module__, "name": observer.__name__, "arguments": arguments}
    return {"PYTHONPATH": path, OBSERVER: json.dumps(about, default=str)}


@contextmanager
def environment(**new: str) -> Iterator[None]:
    """Variables that count inside the block, and for what is started there.

    Enter it before the fork server starts, which forks ranks with the environment that it has
    found."""
    before = {name: os.environ[name] for name in new if name in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
        os.environ.update(before)


def attach(optimizers: ModuleType) -> None:
    """Register the observer. optimizers: torch.optim.optimizer, just imported.

    An interpreter of its own then ends as ranks that we fork do: gloo's threads first.
    """
    atexit.register(wait_for_gloo)
    optimizers.register_optimizer_step_pre_hook(
        lambda optimizer, *_: observer().before_step(optimizer)
    )
    optimizers.register_optimizer_step_post_hook(
        lambda optimizer, *_: observer().after_step(optimizer)
    )


@cache
def observer() -> StepObserver:
    about = json.loads(os.environ[OBSERVER])
    found: StepObserver = getattr(import_module(about["module"]), about["name"])(
        **about["arguments"]
    )
    return found


def who() -> tuple[int, int]:
    """Rank and number of ranks. A script that spawns its ranks itself has them in its process group
    alone.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    world = World.detect()
    return world.rank, world.world_size


def count_file(folder: Path, rank: int) -> Path:
    """How many steps a rank has made, where somebody wanted a number of them."""
    return folder / f"rank-{rank}.steps"


def await_all(done: Callable[[], bool], seconds: float) -> None:
    """Until all ranks are done: a rank that left while another is in its last collective makes that
    one fail.
    """
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
