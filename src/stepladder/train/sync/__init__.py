"""The values of `--sync`, each with the class that combines the gradients of all ranks."""

from __future__ import annotations

import torch

from stepladder.train.comm import Comm
from stepladder.train.sync.base import SingleProcessSync, Sync
from stepladder.train.sync.ddp import BucketedSync
from stepladder.train.sync.exact import ExactSync
from stepladder.train.sync.manual import ManualSync

SYNC_CLASSES: dict[str, type[Sync]] = {
    "manual": ManualSync,
    "ddp": BucketedSync,
    "exact": ExactSync,
}


def make_sync(mode: str, model: torch.nn.Module, comm: Comm, extra_size: int = 0) -> Sync:
    """Return the Sync of a mode.

    Args:
        mode: The value of `--sync`.
        model: The model whose gradients are combined.
        comm: The ranks.
        extra_size: Length of the vector that each microbatch adds besides its gradient.

    Returns:
        A Sync; a single process has one of its own, except for `exact`.
    """
    if comm.alone and mode != "exact":
        return SingleProcessSync(model, comm, extra_size)
    return SYNC_CLASSES[mode](model, comm, extra_size)
