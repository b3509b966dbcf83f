"""Running statistics of batch norm that do not depend on which rank computed which microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stepladder.core.plan import Plan
from stepladder.train.step_listener import LoopListener
from stepladder.train.sync.base import Backward, StepResult


def find_batch_norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the batch-norm layers that keep running statistics, in registration order."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]


class RunningStatistics(LoopListener):
    """Moves the running statistics of batch norm once per step, by the mean over its microbatches.

    The mean and variance of each microbatch are captured (with momentum 1.0 during forward) and
    averaged, weighted by the number of samples. So the running statistics are the same for any
    number of processes, up to the rounding of that sum.
    """

    def __init__(self, model: nn.Module | None, plan: Plan | None = None) -> None:
        """Keep the statistics of a model; of none where a rank computes its share in one pass."""
        self.plan = plan
        self.layers = find_batch_norms(model) if model is not None else []
        self.momenta = [layer.momentum for layer in self.layers]
        # mypy: they are None only in layers that keep no statistics.
        self.buffers: list[Any] = []
        self.counters: list[Any] = []
        for layer in self.layers:
            self.buffers += [layer.running_mean, layer.running_var]
            self.counters.append(layer.num_batches_tracked)
        # Elements of the statistics of all layers.
        self.size = sum(buffer.numel() for buffer in self.buffers)
        self.buffers_before: list[Tensor] = []  # empty when no step is under way
        self.counters_before: list[Tensor] = []

    def begin_step(self, step: int, backward: Backward) -> Backward:
        """Prepare for the step's microbatches."""
        self.begin()
        return backward

    def after_reduce(self, step: int, result: StepResult) -> None:
        """Move the running statistics by what follows the loss in the step's extra values."""
        assert result.extra is not None and self.plan is not None
        first, end = self.plan.batch(step)
        self.finish(result.extra[1:] / (end - first))

    @torch.no_grad()
    def begin(self) -> None:
        """Save the running statistics, and have forward write a microbatch's statistics instead."""
        self.buffers_before = [buffer.clone() for buffer in self.buffers]
        self.counters_before = [counter.clone() for counter in self.counters]
        for layer in self.layers:
            layer.momentum = 1.0

    @torch.no_grad()
    def cancel(self) -> None:
        """Restore the statistics from before the step, if one is under way."""
        if not self.layers or not self.buffers_before:
            return
        for buffer, before in zip(self.buffers, self.buffers_before, strict=True):
            buffer.copy_(before)
        for counter, before in zip(self.counters, self.counters_before, strict=True):
            counter.copy_(before)
        for layer, momentum in zip(self.layers, self.momenta, strict=True):
            layer.momentum = momentum
        self.buffers_before = []

    @torch.no_grad()
    def capture(self) -> Tensor:
        """Return the statistics of the microbatch that forward has just read, shape (size,)."""
        return torch.cat([buffer.reshape(-1) for buffer in self.buffers])

    @torch.no_grad()
    def finish(self, mean: Tensor) -> None:
        """Move the running statistics towards the mean of the step.

        A layer in eval mode, which the user has frozen, keeps its statistics.

        Args:
            mean: The mean of all microbatches' statistics, weighted by samples; shape (size,).
        """
        parts = mean.split([buffer.numel() for buffer in self.buffers])
        for index, layer in enumerate(self.layers):
            momentum = self.momenta[index]
            layer.momentum = momentum
            self.counters[index].copy_(self.counters_before[index] + layer.training)
            if not layer.training:
                continue
            weight = momentum
            if weight is None:  # a cumulative average
                weight = 1.0 / float(self.counters[index])
            for number in (2 * index, 2 * index + 1):  # mean and variance
                buffer = self.buffers[number]
                before = self.buffers_before[number]
                buffer.copy_(before.lerp(parts[number].view_as(buffer), weight))
        self.buffers_before = []
