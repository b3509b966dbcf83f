"""An exponential moving average of the weights: evaluated in their place, and kept in snapshots
beside them.

average = decay * average + (1 - decay) * weights, after each optimizer step (Polyak and Juditsky,
1992, have the mean over all steps; with a decay, early weights are forgotten)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from stepladder.storage.slices import Rows, rows_of


class WeightAverage:
    """Of the parameters that are trained; buffers count as they are. Each element by itself: of a
    rank that holds rows of the weights, their average has the same bits."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.params = {
            name: param for name, param in model.named_parameters() if param.requires_grad
        }
        self.weight = 1.0 - decay
        self.reset()

    def reset(self) -> None:
        """The weights as they are now."""
        self.values = {
            name: rows_of(param).values.detach().clone() for name, param in self.params.items()
        }

    def update(self) -> None:
        """After a step of the optimizer."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self.values.values()), self._weights(), self.weight)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """In the block the model has the average as its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def rows(self) -> dict[str, Rows]:
        """What this rank has of it, by name."""
        rows = {name: rows_of(param) for name, param in self.params.items()}
        return {name: one._replace(values=self.values[name]) for name, one in rows.items()}

    @torch.no_grad()
    def load(self, stored: dict[str, torch.Tensor]) -> None:
        """Take the parts that are this rank's out of a whole average. Raises KeyError for a missing
        one.
        """
        for name, one in self.rows().items():
            whole = stored[name]
            one.values.copy_(
                whole[one.first : one.first + len(one.values)] if whole.ndim else whole
            )

    def _weights(self) -> list[torch.Tensor]:
        return [rows_of(param).values.detach() for param in self.params.values()]

    @torch.no_grad()
    def _swap(self) -> None:
        for weights, average in zip(self._weights(), self.values.values(), strict=True):
            kept = (
                weights.clone()
            )  # what points to the weights must go on to do so: only their contents move
            weights.copy_(average)
            average.copy_(kept)
