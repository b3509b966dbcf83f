"""Looking at a script's optimizer steps from the outside: no edit, no import, no wrapper in the script.

The launcher puts the folder `startup` on the ranks' PYTHONPATH. Its `sitecustomize` is run by each interpreter
at its start, and calls `attach` when torch's optimizers are imported, which registers torch's own global hooks.
Nothing of it is there for ranks that nobody observes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

STARTUP = Path(__file__).parent / "startup"
OBSERVER = "STEPLADDER_OBSERVER"


@contextmanager
def observed_by(module: str, **about: str) -> Iterator[None]:
    """In ranks that are started inside the block, each optimizer step calls the module's `before_step(optimizer)`
    and `after_step(optimizer)`; it is imported at the first. about: environment variables for it.

    Enter it before the fork server starts, which forks ranks with the environment that it has found.
    """
    path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH", "")]))
    with environment(PYTHONPATH=path, **{OBSERVER: module}, **about):
        yield


@contextmanager
def environment(**new: str) -> Iterator[None]:
    """Variables that count inside the block, and for what is started there."""
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def attach(optimizers: ModuleType) -> None:
    """Register the observer. optimizers: torch.optim.optimizer, just imported."""
    optimizers.register_optimizer_step_pre_hook(lambda optimizer, *_: observer().before_step(optimizer))
    optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: observer().after_step(optimizer))


@cache
def observer() -> Any:
    return import_module(os.environ[OBSERVER])
