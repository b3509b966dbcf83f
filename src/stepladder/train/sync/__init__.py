"""How gradients meet: the values of `--sync`, each with what serves it."""

from __future__ import annotations

import torch

from stepladder.train.comm import Comm
from stepladder.train.sync.base import SingleProcessSync, Sync
from stepladder.train.sync.ddp import BucketedSync
from stepladder.train.sync.exact import ExactSync
from stepladder.train.sync.fully_sharded import FullyShardedExactSync, FullyShardedSync
from stepladder.train.sync.manual import ManualSync

MODES: dict[str, type[Sync]] = {"manual": ManualSync, "ddp": BucketedSync, "exact": ExactSync}
FULL = {"ddp": FullyShardedSync, "exact": FullyShardedExactSync}


def make_sync(
    mode: str, model: torch.nn.Module, comm: Comm, extra_size: int = 0, full: bool = False
) -> Sync:
    """The Sync of a mode.

    extra_size: length of the vector that each microbatch adds beside its gradient.  full: of a
    model that fully_shard has spread."""
    chosen = (
        SingleProcessSync if comm.alone and mode != "exact" else (FULL if full else MODES)[mode]
    )
    return chosen(model, comm, extra_size)
