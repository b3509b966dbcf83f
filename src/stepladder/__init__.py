"""One PyTorch training job, from one device to a cluster, with the same answer on every step of the ladder.

Public names are imported when first used, so that commands which need no torch do not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepladder.comm import Comm, process_group
    from stepladder.data.sharding import write_shards
    from stepladder.data.shards import Shards
    from stepladder.errors import InputError
    from stepladder.job import Job, mean_loss
    from stepladder.plan import Plan, PlanSampler
    from stepladder.settings import Settings
    from stepladder.snapshot import Snapshots
    from stepladder.trainer import Trainer
    from stepladder.world import World

_HOMES = {
    "Comm": "comm", "process_group": "comm", "InputError": "errors", "Job": "job", "mean_loss": "job",
    "Plan": "plan", "PlanSampler": "plan", "Settings": "settings", "Shards": "data.shards",
    "Snapshots": "snapshot", "write_shards": "data.sharding",
    "Trainer": "trainer", "World": "world",
}  # fmt: skip

__all__ = [
    "Comm", "InputError", "Job", "Plan", "PlanSampler", "Settings", "Shards", "Snapshots", "Trainer", "World",
    "mean_loss", "process_group", "write_shards",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "launch":  # a package that can be called
        return importlib.import_module("stepladder.launch")
    if name not in _HOMES:
        raise AttributeError(f"module 'stepladder' has no attribute {name!r}")
    return getattr(importlib.import_module(f"stepladder.{_HOMES[name]}"), name)
