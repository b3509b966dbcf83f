"""`--shard full`: fully_shard adds gradients over ranks during backward; each rank has its rows of them."""

from __future__ import annotations

import torch

from stepladder.train.sync.base import Sync


class FullySharded(Sync):
    """What fully_shard has left in `.grad`, divided by what the loss counts over all ranks."""

    def _complete(self) -> None:
        if self.extra is not None:
            self.comm.all_reduce(self.extra).wait()

    def _divide(self, count: float) -> None:
        if grads := [p.grad.to_local() for p in self.params if p.grad is not None]:  # type: ignore[attr-defined]
            with torch.no_grad():
                torch._foreach_div_(grads, count)
