"""Running statistics of batch norm that do not depend on which rank computed which microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stepladder.core.errors import InputError
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

    def __init__(self, model: nn.Module | None) -> None:
        """Keep the statistics of a model; of none where a rank computes its share in one pass."""
        self.layers = find_batch_norms(model) if model is not None else []
        self.momenta = [layer.momentum for layer in self.layers]
        # mypy: they are None only in layers that keep no statistics.
        self.buffers: list[Any] = []
        self.counters: list[Any] = []
        for layer in self.layers:
            self.buffers += [layer.running_mean, layer.running_var]
            self.counters.append(layer.num_batches_tracked)
        # Elements of the statistics of all layers, and of each layer's count of samples.
        self.statistic_sizes = [buffer.numel() for buffer in self.buffers]
        self.size = sum(self.statistic_sizes) + len(self.layers)
        # The counters after the last microbatch: a layer that a microbatch skips does not count.
        self.last_counters = torch.zeros(0)
        self.captured = torch.zeros(0)  # what `capture` has returned last
        # For each element of the statistics, the index of its layer.
        indices = [i // 2 for i, size in enumerate(self.statistic_sizes) for _ in range(size)]
        device = self.buffers[0].device if self.buffers else None
        self.layer_of_element = torch.tensor(indices, dtype=torch.long, device=device)
        self.buffers_before: list[Tensor] = []  # empty when no step is under way
        self.counters_before: list[Tensor] = []

    def begin_step(self, step: int, backward: Backward) -> Backward:
        """Prepare for the step's microbatches."""
        self.begin()
        return backward

    def after_reduce(self, step: int, result: StepResult) -> None:
        """Move the running statistics by what follows the loss in the step's extra values."""
        assert result.extra is not None
        self.finish(result.extra[1:])

    @torch.no_grad()
    def begin(self) -> None:
        """Save the running statistics, and have forward write a microbatch's statistics instead.

        Raises:
            InputError: The momentum of a layer has changed.
        """
        if [layer.momentum for layer in self.layers] != self.momenta:
            raise InputError(
                "the momentum of a batch norm has changed, which no snapshot would have",
                "set it in build",
            )
        self.buffers_before = [buffer.clone() for buffer in self.buffers]
        self.counters_before = [counter.clone() for counter in self.counters]
        if self.layers:
            self.last_counters = torch.stack(self.counters)
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
    def capture(self, samples: int) -> Tensor:
        """Return the statistics of the microbatch that forward has just read, to be added.

        Args:
            samples: In the microbatch.

        Returns:
            The mean and the variance of each layer times its count of samples, and these counts,
            which are zero for layers that forward has skipped; shape (size,).
        """
        counters = torch.stack(self.counters)
        layer_counts = (counters != self.last_counters).float() * samples
        self.last_counters = counters
        statistics = torch.cat([buffer.reshape(-1).float() for buffer in self.buffers])
        weighted = statistics * layer_counts[self.layer_of_element]
        self.captured = torch.cat([weighted, layer_counts])
        return self.captured

    @torch.no_grad()
    def finish(self, total: Tensor) -> None:
        """Move the running statistics towards the mean of the step.

        A layer that no microbatch has called in training mode keeps its statistics.

        Args:
            total: What `capture` has returned, added over all microbatches; shape (size,).
        """
        sums, layer_counts = total.split([sum(self.statistic_sizes), len(self.layers)])
        mean = sums / layer_counts.clamp(min=1)[self.layer_of_element]
        parts = mean.split(self.statistic_sizes)
        is_called = [bool(count) for count in layer_counts.cpu()]
        for index, layer in enumerate(self.layers):
            momentum = self.momenta[index]
            layer.momentum = momentum
            self.counters[index].copy_(self.counters_before[index] + is_called[index])
            if not is_called[index]:
                for number in (2 * index, 2 * index + 1):
                    self.buffers[number].copy_(self.buffers_before[number])
                continue
            weight = momentum
            if weight is None:  # a cumulative average
                weight = 1.0 / float(self.counters[index])
            for number in (2 * index, 2 * index + 1):  # mean and variance
                buffer = self.buffers[number]
                before = self.buffers_before[number]
                buffer.copy_(before.lerp(parts[number].view_as(buffer), weight))
        self.buffers_before = []
