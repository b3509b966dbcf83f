"""How gradients meet: the values of `--sync`, each with what serves it."""

from __future__ import annotations

import torch

from stepladder.train.comm import Comm
from stepladder.train.sync.base import Alone, Sync
from stepladder.train.sync.ddp import Bucketed
from stepladder.train.sync.full import FullySharded, FullyShardedExact
from stepladder.train.sync.manual import Manual
from stepladder.train.sync.tree import Exact

MODES: dict[str, type[Sync]] = {"manual": Manual, "ddp": Bucketed, "exact": Exact}
FULL = {"ddp": FullySharded, "exact": FullyShardedExact}


def make_sync(
    mode: str, model: torch.nn.Module, comm: Comm, extra_size: int = 0, full: bool = False
) -> Sync:
    """The Sync of a mode.

    extra_size: length of the vector that each microbatch adds beside its gradient.  full: of a
    model that fully_shard has spread."""
    chosen = Alone if comm.alone and mode != "exact" else (FULL if full else MODES)[mode]
    return chosen(model, comm, extra_size)
