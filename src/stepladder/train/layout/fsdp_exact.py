"""`--sync exact --shard full`: stepping a rank's rows gives the bits of complete weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepladder.core.settings import Settings
from stepladder.storage.snapshot_slices import get_local_slice
from stepladder.train.comm import Comm
from stepladder.train.job import Job
from stepladder.train.layout.base import StateLayout
from stepladder.train.layout.flat import Flat
from stepladder.train.layout.fsdp import FullyShardedLayout, distribute_like, is_distributed
from stepladder.train.layout.pieces import ALIGNMENT, substitute_params
from stepladder.train.model_blocks import validate_unhooked
from stepladder.train.optimizers import validate_unobserved
from stepladder.train.phases import EXCHANGING
from stepladder.train.sync.base import Sync
from stepladder.train.sync.fully_sharded import FullyShardedExactSync


class _Cut(NamedTuple):
    """Elements [lo, hi) of a rank's rows, at index `before` of a tensor of `size` elements."""

    lo: int
    hi: int
    before: int
    size: int


class _AlignedRows:
    """A rank's rows of one weight, cut where vectors begin and end in the complete weight.

    A processor computes in vectors, and the elements after the last full vector one by one, which a
    fused AdamW rounds differently. So both ends of the rows are stepped in padded copies. The rows
    between the ends, which are nearly all, are stepped in place.
    """

    def __init__(self, param: Any) -> None:
        self.param = param
        self.cuts = _make_cuts(param)
        # Flat tensors with gradients: the rows between the ends, then the padded ends.
        self.parts = self.cut(get_local_slice(param).values)
        if param.grad is not None:
            for part, grad in zip(self.parts, self.cut(param.grad.to_local()), strict=True):
                part.grad = grad

    def cut(self, rows: Tensor) -> list[Tensor]:
        """Cut a tensor of the rows' shape: a view between the ends, and padded copies of them."""
        flat = rows.view(-1)
        middle, *ends = self.cuts
        parts = [flat[middle.lo : middle.hi]]
        for end in ends:
            padded = rows.new_zeros(end.size)
            values = flat[end.lo : end.hi]
            padded[end.before : end.before + len(values)] = values
            parts.append(padded)
        return parts

    def store(self, parts: list[Tensor], rows: Tensor) -> None:
        """Copy the parts of `cut`, or new parts of their shapes, into the rows."""
        flat = rows.view(-1)
        for cut, part in zip(self.cuts, parts, strict=True):
            target = flat[cut.lo : cut.hi]
            stepped = part[cut.before : cut.before + cut.hi - cut.lo]
            if not target.is_set_to(stepped):
                target.copy_(stepped)


def _make_cuts(param: Any) -> list[_Cut]:
    """Return the cut between the ends of a rank's rows, then a cut for each end that exists."""
    rows = get_local_slice(param)
    count = param.numel()
    lo = rows.first * (count // max(1, param.shape[0]))
    hi = lo + rows.values.numel()
    first = min(-(-lo // ALIGNMENT) * ALIGNMENT, hi)
    last = hi if hi == count else max(first, hi // ALIGNMENT * ALIGNMENT)
    cuts = [_Cut(first - lo, last - lo, 0, last - first)]
    for begin, end in ((lo, first), (last, hi)):
        if begin < end:
            start = begin // ALIGNMENT * ALIGNMENT
            size = min(ALIGNMENT, count - start)
            cuts.append(_Cut(begin - lo, end - lo, begin - start, size))
    return cuts


class FullyShardedExactLayout(FullyShardedLayout):
    """Rows that are stepped as plain tensors, with a norm that is independent of their ranks."""

    @classmethod
    def choose(cls, settings: Settings, job: Job, comm: Comm) -> type[StateLayout]:
        """Return this class with --sync exact; a single process needs no rows."""
        if comm.alone:
            return Flat.choose(settings, job, comm)
        return cls if settings.sync == "exact" else FullyShardedLayout

    def make_sync(self, mode: str, extra_size: int) -> Sync:
        """Return what adds each block's gradients in the tree of `exact`."""
        return FullyShardedExactSync(self.model, self.comm, extra_size)

    @contextmanager
    def stepping(self) -> Iterator[Callable[[], object]]:
        """Give the optimizer this rank's rows in the block, with their gradients and state."""
        validate_unobserved(self.optimizer, "full")
        validate_unhooked(self.model)
        distributed_state = self.optimizer.state
        pieces_by_group = [
            [_AlignedRows(param) for param in group["params"]]
            for group in self.optimizer.param_groups
        ]
        pieces = [piece for group_pieces in pieces_by_group for piece in group_pieces]
        state: Any = defaultdict(dict)
        for piece in pieces:
            for name, value in distributed_state.get(piece.param, {}).items():
                if is_distributed(value):
                    values = piece.cut(value.to_local())
                else:
                    # Each part has its own count of steps: a fused step adds to all of them.
                    values = [_copy_value(value) for _ in piece.parts]
                for part, part_value in zip(piece.parts, values, strict=True):
                    state[part][name] = part_value
        parts_by_group = [
            [part for piece in group_pieces for part in piece.parts]
            for group_pieces in pieces_by_group
        ]
        with substitute_params(self.optimizer, parts_by_group, state) as step:
            yield step
        for piece in pieces:  # one weight after the other, which takes less memory
            self._store(piece, [state.pop(part, {}) for part in piece.parts])

    def _store(self, piece: _AlignedRows, states: list[dict[str, Any]]) -> None:
        """Store the stepped values of a weight, and the state of each of its parts."""
        values = get_local_slice(piece.param).values
        piece.store(piece.parts, values)
        stored = self.optimizer.state
        for name, value in states[0].items():
            is_elementwise = isinstance(value, Tensor) and (value.shape == piece.parts[0].shape)
            if not is_elementwise:
                stored[piece.param][name] = value
                continue
            if not is_distributed(stored[piece.param].get(name)):
                stored[piece.param][name] = distribute_like(piece.param, values.to(value.dtype))
            rows = stored[piece.param][name].to_local()
            piece.store([state[name] for state in states], rows)

    def _gather_tensor(self, rows: Any) -> Tensor:
        with self.comm.phases(EXCHANGING):
            gathered: Tensor = rows.full_tensor()
        return gathered

    def clip(self, max_norm: float) -> Tensor:
        """Clip gradients as torch's clip_grad_norm_ does with complete gradients.

        One gradient at a time is gathered. All ranks must call this method.

        Args:
            max_norm: The largest norm that all gradients together may have.

        Returns:
            The norm before clipping, shape ().
        """
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        norms = [torch.linalg.vector_norm(self._gather_tensor(grad)) for grad in grads]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.to_local().mul_(factor)  # type: ignore[attr-defined]
        return norm


def _copy_value(value: Any) -> Any:
    """Copy a value; deepcopy cannot copy the fake tensors of a dry run."""
    return value.clone() if isinstance(value, Tensor) else deepcopy(value)
