"""`--sync manual`: data parallelism in its simplest form."""

from __future__ import annotations

import torch

from stepladder.train.sync.base import Sync


class ManualSync(Sync):
    """One all-reduce per parameter after backward, with no overlap."""

    def _wait_for_sums(self) -> None:
        if self.extra is not None:
            self.comm.all_reduce(self.extra).wait()
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            self.comm.all_reduce(param.grad).wait()
