"""Called once per process, when torch has been imported: every patch of the probe."""

from __future__ import annotations

import atexit
from contextlib import suppress

from stepladder.rank.torch_fixes import bind_store_to_loopback, wait_for_gloo
from stepladder.tools.check.probe import (
    hooks_comm,
    hooks_data,
    hooks_files,
    hooks_index,
    hooks_model,
    hooks_random,
    hooks_snapshot,
    hooks_train,
)
from stepladder.tools.check.probe.recorder import here


def attach() -> None:
    bind_store_to_loopback()
    hooks = (
        hooks_comm,
        hooks_data,
        hooks_files,
        hooks_index,
        hooks_model,
        hooks_random,
        hooks_snapshot,
    )
    for one in (*hooks, hooks_train):
        one.attach()
    atexit.register(at_exit)


def at_exit() -> None:
    import torch.distributed as dist

    with suppress(Exception):
        here().write("exit", group=dist.is_available() and dist.is_initialized())
    with suppress(Exception):
        wait_for_gloo()
