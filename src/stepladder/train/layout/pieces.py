"""Which elements of the optimizer's parameters each rank has with `--shard optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepladder.rank.torch_fixes import share_storage
from stepladder.train.comm import Comm

ALIGNMENT = 64  # elements: more than any processor's vectors hold


class ShardPiece(NamedTuple):
    """Elements [lo, hi) of a parameter.

    Args:
        number: The index of the parameter among all parameters of the optimizer.
        param: The parameter.
        lo: The first element.
        hi: The element after the last one.
        values: A view of the elements.
    """

    number: int
    param: nn.Parameter
    lo: int
    hi: int
    values: Tensor

    @property
    def is_whole(self) -> bool:
        return self.hi - self.lo == self.param.numel()

    @property
    def lies_in_param(self) -> bool:
        """Whether the values are where the parameter is."""
        begin = self.param.storage_offset() + self.lo
        return self.values.storage_offset() == begin and share_storage(self.values, self.param)

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the piece's part of a tensor of the parameter's shape, as a view if possible."""
        return tensor if self.is_whole else tensor.reshape(-1)[self.lo : self.hi]


class ShardBucket:
    """Some parameters of one type: the pieces that each rank has, and how to gather them."""

    def __init__(self, pieces: list[list[ShardPiece]], rank: int) -> None:
        self.pieces_by_rank = pieces
        self.own_pieces = pieces[rank]
        self.peer_pieces = [(peer, pieces[peer]) for peer in range(len(pieces)) if peer != rank]
        self.width = max(_count_elements(rank_pieces) for rank_pieces in pieces)
        self.like = next(rank_pieces[0].values for rank_pieces in pieces if rank_pieces)

    def gather(self, comm: Comm, sent: Tensor, gathered: Tensor) -> None:
        """Copy the other ranks' values of their pieces, by way of the two buffers."""
        ranks = len(self.pieces_by_rank)
        if ranks == 1:
            return
        sent = sent[: self.width]
        gathered = gathered[: self.width * ranks]
        _pack_pieces(self.own_pieces, sent)
        comm.all_gather(gathered, sent).wait()
        rows = gathered.view(ranks, self.width)
        for peer, pieces in self.peer_pieces:
            _unpack_pieces(rows[peer], pieces)


def slices_of_rank(rank: int, ranks: int, copies: int) -> list[int]:
    """Return the slices that a rank holds: its own, and those of the ranks before it."""
    return [(rank - distance) % ranks for distance in range(min(copies, ranks))]


def partition(
    params: list[nn.Parameter],
    numbers: dict[nn.Parameter, int],
    load: list[int],
    elementwise: set[nn.Parameter],
) -> list[list[ShardPiece]]:
    """Return each rank's pieces of a bucket.

    Parameters that can be cut are divided into equal slices. Each other parameter goes to the rank
    with the least load.

    Args:
        params: The parameters of the bucket.
        numbers: The index of each parameter among all parameters of the optimizer.
        load: By rank, the elements of uncut parameters so far; this function adds to it.
        elementwise: The parameters that can be cut.

    Returns:
        A list of pieces for each rank.
    """
    ranks = len(load)
    pieces: list[list[ShardPiece]] = [[] for _ in range(ranks)]
    cuttable = {param for param in params if param in elementwise and param.is_contiguous()}
    size = sum(param.numel() for param in cuttable)
    edges = [size * rank // ranks for rank in range(ranks + 1)]
    begin = 0  # of the parameter, in the sequence of all that can be cut
    for param in params:
        count = param.numel()
        values = param.detach()
        if param in cuttable:
            for rank in range(ranks):
                lo = _align_cut(edges[rank] - begin, count)
                hi = _align_cut(edges[rank + 1] - begin, count)
                if lo < hi:
                    part = values if hi - lo == count else values.view(-1)[lo:hi]
                    pieces[rank].append(ShardPiece(numbers[param], param, lo, hi, part))
            begin += count
        else:
            rank = min(range(ranks), key=load.__getitem__)
            load[rank] += count
            pieces[rank].append(ShardPiece(numbers[param], param, 0, count, values))
    return pieces


def _align_cut(edge: int, count: int) -> int:
    """Return the nearest index at or below `edge` where a parameter of `count` elements is cut.

    A processor computes in vectors, and the elements after the last full vector one by one, which a
    fused AdamW rounds differently. So slices are cut where vectors begin in the complete parameter.
    """
    return max(0, edge) // ALIGNMENT * ALIGNMENT if edge < count else count


def _count_elements(pieces: list[ShardPiece]) -> int:
    return sum(piece.values.numel() for piece in pieces)


def _pack_pieces(pieces: list[ShardPiece], flat: Tensor) -> None:
    """Copy the pieces into a flat vector, one after the other."""
    if pieces:
        values = [piece.values for piece in pieces]
        torch._foreach_copy_(_split_like(flat, values), values)


def _unpack_pieces(flat: Tensor, pieces: list[ShardPiece]) -> None:
    """Copy a flat vector into the pieces that lie in it one after the other."""
    if pieces:
        values = [piece.values for piece in pieces]
        torch._foreach_copy_(values, _split_like(flat, values))


def _split_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return views of a flat vector, one after the other, in the shapes of the tensors."""
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@contextmanager
def substitute_params(
    optimizer: torch.optim.Optimizer, params_by_group: list[list[Tensor]], state: Any
) -> Iterator[Callable[[], object]]:
    """Give an optimizer other parameters, and their state, for the length of the block."""
    groups = optimizer.param_groups
    own_params = [group["params"] for group in groups]
    own_state = optimizer.state
    for group, params in zip(groups, params_by_group, strict=True):
        group["params"] = params
    optimizer.state = state
    try:
        yield optimizer.step
    finally:
        optimizer.state = own_state
        for group, params in zip(groups, own_params, strict=True):
            group["params"] = params


def clone_with_strides(values: Tensor, param: Tensor) -> Tensor:
    """Return a copy on the parameter's device, with the parameter's strides.

    A fused step goes through the parameter and its state in the order of their memory.
    """
    return torch.empty_like(param, dtype=values.dtype).copy_(values)
