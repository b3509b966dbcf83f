"""An exponential moving average of the weights, which is evaluated in their place.

average = decay * average + (1 - decay) * weights, after each optimizer step. Polyak and Juditsky
(1992) take the mean over all steps; with a decay, early weights are forgotten. Snapshots keep the
average besides the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stepladder.storage.snapshot_slices import (
    AVERAGE_PREFIX,
    STATE_PREFIX,
    SliceReader,
    TensorSlice,
    get_local_slice,
    read_rows,
)
from stepladder.train.step_listener import LoopListener


class WeightAverage(LoopListener):
    """The average of all parameters that are trained; buffers are used as they are.

    Each element is averaged by itself, so on a rank that holds some rows of the weights, the
    average of these rows has the same bits.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.params: dict[str, nn.Parameter] = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                self.params[name] = param
        self.weight = 1.0 - decay
        self.values: dict[str, Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Set the average to the present weights."""
        copies = [weights.clone() for weights in self._weights()]
        self.values = dict(zip(self.params, copies, strict=True))

    def update(self) -> None:
        """Add the weights after a step of the optimizer."""
        averages = list(self.values.values())
        with torch.no_grad():
            torch._foreach_lerp_(averages, self._weights(), self.weight)

    def after_gather(self) -> None:
        """Add the weights of the step."""
        self.update()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the average as its weights for the length of the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def slices(self) -> dict[str, TensorSlice]:
        """Return this rank's rows, by their names in a snapshot."""
        return {STATE_PREFIX + AVERAGE_PREFIX + name: rows for name, rows in self.rows().items()}

    def load_slices(self, reader: SliceReader) -> None:
        """Load this rank's rows, if the snapshot has the average in slices."""
        own_rows = self.slices()
        for name in reader.slices.keys() & own_rows.keys():
            own_rows[name].values.copy_(read_rows(reader, name, own_rows[name]))

    def rows(self) -> dict[str, TensorSlice]:
        """Return the rows of the average that this rank has, by the name of the parameter."""
        rows = {}
        for name, param in self.params.items():
            rows[name] = get_local_slice(param)._replace(values=self.values[name])
        return rows

    @torch.no_grad()
    def load(self, stored: dict[str, Tensor]) -> None:
        """Load this rank's rows from a complete average.

        Raises:
            KeyError: If it lacks a parameter.
        """
        for name, rows in self.rows().items():
            average = stored[name]
            if average.ndim:
                average = average[rows.first : rows.first + len(rows.values)]
            rows.values.copy_(average)

    def _weights(self) -> list[Tensor]:
        return [get_local_slice(param).values.detach() for param in self.params.values()]

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap the contents, not the tensors: other objects hold references to the weights."""
        pairs = zip(self._weights(), self.values.values(), strict=True)
        for weights, average in pairs:
            copy = weights.clone()
            weights.copy_(average)
            average.copy_(copy)
