"""Have the ranks that this process starts attach a listener to the steps of their optimizers."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol

from stepladder_exchange.torch_fixes_gloo import wait_for_gloo

STARTUP_FOLDER = Path(__file__).parent / "startup"
OBSERVER_VARIABLE = "STEPLADDER_OBSERVER"


class _StepListener(Protocol):
    """The object that a rank makes at its first optimizer step, and calls before and after each."""

    def before_step(self, optimizer: object) -> None: ...

    def after_step(self, optimizer: object) -> None: ...


def prepend_startup_folder(python_path: str) -> str:
    """Return a PYTHONPATH on which the folder of our `sitecustomize` comes first."""
    return os.pathsep.join(filter(None, [str(STARTUP_FOLDER), python_path]))


def make_listener_variables(listener: type[_StepListener], **arguments: object) -> dict[str, str]:
    """Return the environment variables with which each rank makes `listener(**arguments)`.

    Paths arrive in the rank as text.
    """
    description = {"module": listener.__module__, "name": listener.__name__, "arguments": arguments}
    return {
        "PYTHONPATH": prepend_startup_folder(os.environ.get("PYTHONPATH", "")),
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


def attach() -> None:
    """Register the listener of OBSERVER_VARIABLE with torch's optimizers, in a rank.

    The interpreter then ends as forked ranks do: gloo's threads first.
    """
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    atexit.register(wait_for_gloo)
    register_optimizer_step_pre_hook(lambda optimizer, *_: _get_listener().before_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: _get_listener().after_step(optimizer))


@cache
def _get_listener() -> _StepListener:
    """Return this process's listener, made at the first call."""
    description = json.loads(os.environ[OBSERVER_VARIABLE])
    listener_class = getattr(import_module(description["module"]), description["name"])
    listener: _StepListener = listener_class(**description["arguments"])
    return listener
