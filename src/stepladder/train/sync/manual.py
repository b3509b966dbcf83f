"""`--sync manual`: data parallelism as one writes it by hand first."""

from __future__ import annotations

import torch

from stepladder.train.sync.base import Sync


class ManualSync(Sync):
    """One all-reduce per parameter after backward, nothing overlapped: what one writes by hand
    first.
    """

    def _complete(self) -> None:
        if self.extra is not None:
            self.comm.all_reduce(self.extra).wait()
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            self.comm.all_reduce(param.grad).wait()
