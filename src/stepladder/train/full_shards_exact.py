"""`--sync exact --shard full`: what a step does to this rank's rows has the bits that it has on
whole weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from stepladder.storage.snapshot_slices import get_local_slice
from stepladder.train.full_shards import FullShards, distribute_like, is_distributed
from stepladder.train.optimizer_shards import ALIGNMENT
from stepladder.train.phases import EXCHANGING


class Cut(NamedTuple):
    """Elements [lo, hi) of a rank's rows of a weight. They begin `before` elements into a tensor of
    `size`.
    """

    lo: int
    hi: int
    before: int
    size: int


class AlignedRows:
    """A rank's rows of one weight, cut where the processor's vectors begin and end in the whole
    weight.

    What is left of a loop by vectors is computed one by one, and a fused AdamW rounds that
    differently. So the rows' ends are stepped in vectors of their own, filled up with zeros, whose
    step nobody reads. What lies between them, nearly all, is stepped where it is.  parts: flat, of
    the values, with their gradients."""

    def __init__(self, param: Any) -> None:
        rows, count = get_local_slice(param), param.numel()
        lo = rows.first * (count // max(1, param.shape[0]))
        hi = lo + rows.values.numel()
        first = min(-(-lo // ALIGNMENT) * ALIGNMENT, hi)
        last = hi if hi == count else max(first, hi // ALIGNMENT * ALIGNMENT)
        self.cuts = [Cut(first - lo, last - lo, 0, last - first)]
        for begin, end in ((lo, first), (last, hi)):
            if begin < end:
                start = begin // ALIGNMENT * ALIGNMENT
                self.cuts.append(
                    Cut(begin - lo, end - lo, begin - start, min(ALIGNMENT, count - start))
                )
        self.param, self.parts = param, self.cut(rows.values)
        if param.grad is not None:
            for part, grad in zip(self.parts, self.cut(param.grad.to_local()), strict=True):
                part.grad = grad

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Of what lies as the rows do: a view of what is between the ends, then copies of these."""
        flat = rows.view(-1)
        parts = [flat[at.lo : at.hi] for at in self.cuts]
        for number, at in enumerate(self.cuts[1:], 1):
            wide = rows.new_zeros(at.size)
            wide[at.before : at.before + len(parts[number])] = parts[number]
            parts[number] = wide
        return parts

    def take(self, rows: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Into the rows what a step has left in `cut`'s parts, or in new ones."""
        flat = rows.view(-1)
        for at, part in zip(self.cuts, parts, strict=True):
            own, stepped = flat[at.lo : at.hi], part[at.before : at.before + at.hi - at.lo]
            if not own.is_set_to(stepped):
                own.copy_(stepped)


class ExactShards(FullShards):
    """FullShards whose optimizer steps plain tensors, and whose norm does not depend on who has
    which rows.
    """

    @contextmanager
    def stepping(self) -> Iterator[Callable[[], object]]:
        """In the block the optimizer has this rank's rows, with their gradients and their state."""
        groups, spread = self.optimizer.param_groups, self.optimizer.state
        whole = [group["params"] for group in groups]
        pieces = [[AlignedRows(param) for param in params] for params in whole]
        state: Any = defaultdict(dict)
        for piece in (piece for own in pieces for piece in own):
            for name, value in spread.get(piece.param, {}).items():
                # Each part has a count of steps of its own: a fused step adds to all that it is
                # given.
                values = (
                    piece.cut(value.to_local())
                    if is_distributed(value)
                    else [copy_value(value) for _ in piece.parts]
                )
                for part, one in zip(piece.parts, values, strict=True):
                    state[part][name] = one
        for group, own in zip(groups, pieces, strict=True):
            group["params"] = [part for piece in own for part in piece.parts]
        self.optimizer.state = state
        try:
            yield self.optimizer.step
        finally:
            self.optimizer.state = spread
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        for piece in (piece for own in pieces for piece in own):
            self._take_back(
                piece, [state.pop(part, {}) for part in piece.parts]
            )  # by weights: less memory

    def _take_back(self, piece: AlignedRows, states: list[dict[str, Any]]) -> None:
        """What the step has left: new values, and a state that may be new. states: of each part."""
        kept, values = self.optimizer.state, get_local_slice(piece.param).values
        piece.take(values, piece.parts)
        for name, value in states[0].items():
            if not (isinstance(value, torch.Tensor) and value.shape == piece.parts[0].shape):
                kept[piece.param][name] = value
                continue
            if not is_distributed(kept[piece.param].get(name)):
                kept[piece.param][name] = distribute_like(piece.param, values.to(value.dtype))
            piece.take(kept[piece.param][name].to_local(), [state[name] for state in states])

    def _gathered(self, rows: Any) -> torch.Tensor:
        with self.comm.phases(EXCHANGING):
            whole: torch.Tensor = rows.full_tensor()
        return whole

    def clip(self, most: float) -> torch.Tensor:
        """As torch's clip_grad_norm_ of whole gradients, of which one at a time is gathered. A
        collective.
        """
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        norms = [torch.linalg.vector_norm(self._gathered(grad)) for grad in grads]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.to_local().mul_(factor)  # type: ignore[attr-defined]
        return norm


def full_shards_class(sync: str) -> type[FullShards]:
    """What spreads a model with this --sync."""
    return ExactShards if sync == "exact" else FullShards


def copy_value(value: Any) -> Any:
    """deepcopy cannot copy the weightless tensors of a dry run."""
    return value.clone() if isinstance(value, torch.Tensor) else deepcopy(value)
