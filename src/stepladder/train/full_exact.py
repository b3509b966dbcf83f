"""`--sync exact --shard full`: what a step does to this rank's rows has the bits that it has on whole weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepladder.storage.slices import rows_of
from stepladder.train.full import FullShards, is_spread, spread_as
from stepladder.train.shard import ALIGNED


class AlignedRows:
    """A rank's rows of one weight, widened to where the processor's vectors begin and end in the whole weight.

    What is left of a loop by vectors is computed one by one, and a fused AdamW rounds that differently. Beside the
    rows lie zeros, whose step nobody reads. values: the rows themselves where nothing is to be widened.
    """

    def __init__(self, param: Any) -> None:
        rows = rows_of(param)
        lo = rows.first * (param.numel() // max(1, param.shape[0]))
        hi = lo + rows.values.numel()
        self.param, self.shape = param, rows.values.shape
        self.start = lo // ALIGNED * ALIGNED
        self.end = min(-(-hi // ALIGNED) * ALIGNED, param.numel())
        self.inner = slice(lo - self.start, hi - self.start)
        self.is_whole = lo == hi or (self.start, self.end) == (lo, hi)
        self.values = self.widened(rows.values)
        if param.grad is not None:
            self.values.grad = self.widened(param.grad.to_local())

    def widened(self, rows: torch.Tensor) -> torch.Tensor:
        if self.is_whole:
            return rows
        wide = rows.new_zeros(self.end - self.start)
        wide[self.inner] = rows.flatten()
        return wide

    def rows(self, wide: torch.Tensor) -> torch.Tensor:
        """Of what `widened` has made, or the optimizer for it."""
        return wide if self.is_whole else wide[self.inner].view(self.shape)


class ExactShards(FullShards):
    """FullShards whose optimizer steps plain tensors, and whose norm does not depend on who has which rows."""

    @contextmanager
    def stepping(self) -> Iterator[Callable[[], object]]:
        """In the block the optimizer has this rank's rows, with their gradients and their state."""
        groups, spread = self.optimizer.param_groups, self.optimizer.state
        whole = [group["params"] for group in groups]
        pieces = [[AlignedRows(param) for param in params] for params in whole]
        state: Any = defaultdict(dict)
        for piece in (piece for own in pieces for piece in own):
            for name, value in spread.get(piece.param, {}).items():
                state[piece.values][name] = piece.widened(value.to_local()) if is_spread(value) else value
        for group, own in zip(groups, pieces, strict=True):
            group["params"] = [piece.values for piece in own]
        self.optimizer.state = state
        try:
            yield self.optimizer.step
        finally:
            self.optimizer.state = spread
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        for piece in (piece for own in pieces for piece in own):
            self._take_back(piece, state.pop(piece.values, {}))  # one at a time: else twice the memory

    def _take_back(self, piece: AlignedRows, state: dict[str, Any]) -> None:
        """What the step has left: new values, and a state that may be new."""
        param, kept = piece.param, self.optimizer.state
        if not piece.is_whole:
            rows_of(param).values.copy_(piece.rows(piece.values))
        piece.values.grad = None
        for name, value in state.items():
            if not (isinstance(value, torch.Tensor) and value.shape == piece.values.shape):
                kept[param][name] = value
            elif not is_spread(kept[param].get(name)):
                kept[param][name] = spread_as(param, piece.rows(value))
            elif (rows := kept[param][name].to_local()).data_ptr() != value.data_ptr():
                rows.copy_(piece.rows(value))

    def clip(self, most: float) -> torch.Tensor:
        """As torch's clip_grad_norm_ of whole gradients, of which one at a time is gathered. A collective."""
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        norms = [torch.linalg.vector_norm(grad.full_tensor()) for grad in grads]  # type: ignore[attr-defined]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.to_local().mul_(factor)  # type: ignore[attr-defined]
        return norm


def shards_by(sync: str) -> type[FullShards]:
    """What spreads a model with this --sync."""
    return ExactShards if sync == "exact" else FullShards
