"""How gradients meet: the values of `--sync`, each with what serves it."""

from __future__ import annotations

import torch

from stepladder.train.comm import Comm
from stepladder.train.sync.base import Alone, Sync
from stepladder.train.sync.ddp import Bucketed
from stepladder.train.sync.full import FullySharded
from stepladder.train.sync.manual import Manual
from stepladder.train.sync.tree import Exact

MODES: dict[str, type[Sync]] = {"manual": Manual, "ddp": Bucketed, "exact": Exact, "full": FullySharded}


def make_sync(mode: str, model: torch.nn.Module, comm: Comm, extra_size: int = 0) -> Sync:
    """The Sync of a mode, or of --shard "full".

    extra_size: length of the vector that each microbatch adds beside its gradient.
    """
    chosen = Alone if comm.alone and mode != "exact" else MODES[mode]
    return chosen(model, comm, extra_size)
