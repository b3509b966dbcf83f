"""Observe a script's optimizer steps from outside: no edit, import or wrapper in the script.

The launcher puts the folder `startup` on the ranks' PYTHONPATH. Each interpreter runs its
`sitecustomize` at start; when torch's optimizers are imported, that calls `attach`, which registers
torch's own global hooks. Ranks that are not observed load nothing of this.
"""

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
OBSERVER_VARIABLE = "STEPLADDER_OBSERVER"


class StepObserver(Protocol):
    """The object that a rank makes at its first optimizer step, and calls before and after each."""

    def before_step(self, optimizer: object) -> None: ...

    def after_step(self, optimizer: object) -> None: ...


def make_observer_variables(observer: type[StepObserver], **arguments: object) -> dict[str, str]:
    """Return the environment variables with which each rank makes `observer(**arguments)`.

    Paths arrive in the rank as text.
    """
    folders = [str(STARTUP), os.environ.get("PYTHONPATH", "")]
    description = {
        "module": observer.__module__,
        "name": observer.__name__,
        "arguments": arguments,
    }
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        OBSERVER_VARIABLE: json.dumps(description, default=str),
    }


@contextmanager
def temporary_environment(**variables: str) -> Iterator[None]:
    """Set environment variables inside the block, also for the processes that it starts.

    Enter the block before the fork server starts: its ranks get the environment of that moment.
    """
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def attach(optimizers: ModuleType) -> None:
    """Register the observer with `optimizers`, the module torch.optim.optimizer just imported.

    The interpreter then ends as forked ranks do: gloo's threads first.
    """
    atexit.register(wait_for_gloo)
    optimizers.register_optimizer_step_pre_hook(
        lambda optimizer, *_: get_observer().before_step(optimizer)
    )
    optimizers.register_optimizer_step_post_hook(
        lambda optimizer, *_: get_observer().after_step(optimizer)
    )


@cache
def get_observer() -> StepObserver:
    """Return this process's observer, made at the first call."""
    description = json.loads(os.environ[OBSERVER_VARIABLE])
    observer_class = getattr(import_module(description["module"]), description["name"])
    observer: StepObserver = observer_class(**description["arguments"])
    return observer


def get_rank_and_world_size() -> tuple[int, int]:
    """Return the rank and the number of ranks.

    If a script spawns its ranks itself, only its process group has these numbers.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    world = World.detect()
    return world.rank, world.world_size


def step_count_path(folder: Path, rank: int) -> Path:
    """Return the path of the file with the number of steps that a rank has made."""
    return folder / f"rank-{rank}.steps"


def wait_for_all(is_done: Callable[[], bool], timeout_s: float) -> None:
    """Wait until all ranks are done, or the timeout is over.

    A rank that is still in its last collective would fail if another rank ended before.
    """
    deadline = time.monotonic() + timeout_s
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.01)
