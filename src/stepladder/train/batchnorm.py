"""Batch norm's running statistics, independent of who computed which microbatch.

Each microbatch's mean and variance are captured (momentum 1.0 during forward), combined weighted by
sample counts, and the running statistics move once per step. So they are the same for any number of
processes up to the rounding of that sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BatchNorm = nn.modules.batchnorm._BatchNorm


def batch_norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The model's batch-norm layers that keep running statistics, in registration order."""
    return [m for m in model.modules() if isinstance(m, BatchNorm) and m.track_running_stats]


class RunningStatistics:
    """Captures the statistics of each microbatch and applies their mean once per step."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = batch_norms(model)
        self.momenta = [layer.momentum for layer in self.layers]
        # None only for layers that track nothing, which batch_norms leaves out.
        self.buffers: list[Any] = [b for m in self.layers for b in (m.running_mean, m.running_var)]
        self.counters: list[Any] = [m.num_batches_tracked for m in self.layers]
        self.size = sum(b.numel() for b in self.buffers)

    @torch.no_grad()
    def begin(self) -> None:
        """Before the step's first forward: keep the running values, and make forward write batch values."""
        self.before = [b.clone() for b in self.buffers]
        self.steps = [counter.clone() for counter in self.counters]
        for layer in self.layers:
            layer.momentum = 1.0

    @torch.no_grad()
    def capture(self) -> torch.Tensor:
        """After a forward: this microbatch's statistics, shape (size,)."""
        return torch.cat([b.reshape(-1) for b in self.buffers])

    @torch.no_grad()
    def finish(self, mean: torch.Tensor) -> None:
        """Move the running values towards the step's count-weighted `mean`, shape (size,).

        A layer in eval mode, frozen by the user, keeps its own.
        """
        parts = mean.split([b.numel() for b in self.buffers])
        for layer, momentum, counter, steps in zip(
            self.layers, self.momenta, self.counters, self.steps, strict=True
        ):
            layer.momentum = momentum
            counter.copy_(steps + layer.training)
        for number, (buffer, before, part) in enumerate(zip(self.buffers, self.before, parts, strict=True)):
            if not self.layers[number // 2].training:
                continue
            momentum = self.momenta[number // 2]
            weight = 1.0 / float(self.counters[number // 2]) if momentum is None else momentum
            buffer.copy_(before.lerp(part.view_as(buffer), weight))
