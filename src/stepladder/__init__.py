"""One PyTorch training job, from one device to a cluster, with the same results on every step.

Public names are imported when they are first used: commands that need no torch do not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepladder.core.errors import InputError, PeerLost
    from stepladder.core.plan import Plan
    from stepladder.core.plan_sampler import PlanSampler
    from stepladder.core.settings import Settings
    from stepladder.core.world import World
    from stepladder.data.filtered import Filtered, Mapped
    from stepladder.data.mixture import Mixture
    from stepladder.data.packed import Packed
    from stepladder.data.padded import Padded
    from stepladder.data.readers.open_data import open_data
    from stepladder.data.shards.dataset import Shards
    from stepladder.data.shards.writer import write_shards
    from stepladder.data.source import Source
    from stepladder.launcher.function import RankFailed, launch
    from stepladder.rank.preemption import StopSignals
    from stepladder.storage.snapshot import Snapshot
    from stepladder.storage.snapshot_store import Snapshots
    from stepladder.train.comm import Comm
    from stepladder.train.group_setup import pick_device
    from stepladder.train.job import Job, Recipe, mean_loss
    from stepladder.train.loader import Loader
    from stepladder.train.metrics.loggers import Logger
    from stepladder.train.optimizers import Optimizers
    from stepladder.train.process_group import process_group
    from stepladder.train.replica_check import ReplicasDiffer
    from stepladder.train.train_result import TrainResult
    from stepladder.train.trainer import Trainer

_NAMES_OF_MODULE = {
    "core.errors": ("InputError", "PeerLost"),
    "core.plan": ("Plan",),
    "core.plan_sampler": ("PlanSampler",),
    "core.settings": ("Settings",),
    "core.world": ("World",),
    "data.filtered": ("Filtered", "Mapped"),
    "data.mixture": ("Mixture",),
    "data.packed": ("Packed",),
    "data.padded": ("Padded",),
    "data.readers.open_data": ("open_data",),
    "data.shards.dataset": ("Shards",),
    "data.shards.writer": ("write_shards",),
    "data.source": ("Source",),
    "launcher.function": ("RankFailed", "launch"),
    "rank.preemption": ("StopSignals",),
    "storage.snapshot": ("Snapshot",),
    "storage.snapshot_store": ("Snapshots",),
    "train.comm": ("Comm",),
    "train.process_group": ("process_group",),
    "train.job": ("Job", "Recipe", "mean_loss"),
    "train.loader": ("Loader",),
    "train.group_setup": ("pick_device",),
    "train.metrics.loggers": ("Logger",),
    "train.optimizers": ("Optimizers",),
    "train.replica_check": ("ReplicasDiffer",),
    "train.train_result": ("TrainResult",),
    "train.trainer": ("Trainer",),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}

__version__ = "0.3.0.dev0"

__all__ = [
    "Comm",
    "Filtered",
    "InputError",
    "Job",
    "Loader",
    "Logger",
    "Mapped",
    "Mixture",
    "Optimizers",
    "Packed",
    "Padded",
    "PeerLost",
    "Plan",
    "PlanSampler",
    "RankFailed",
    "Recipe",
    "ReplicasDiffer",
    "Settings",
    "Shards",
    "Snapshot",
    "Snapshots",
    "Source",
    "StopSignals",
    "TrainResult",
    "Trainer",
    "World",
    "__version__",
    "launch",
    "mean_loss",
    "open_data",
    "pick_device",
    "process_group",
    "write_shards",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'stepladder' has no attribute {name!r}")
    module = importlib.import_module(f"stepladder.{_MODULE_OF_NAME[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
