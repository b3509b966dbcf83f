"""What a rank brings to a meeting in shared memory, and what it takes from there: one collective
each.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable
from operator import add
from typing import NamedTuple

import torch

CACHE_LINE_BYTES = (
    64  # bytes of a cache line, where a message begins; as many elements, where a slice does
)
Tensors = list[torch.Tensor]
CombineFunction = Callable[[Tensors, int, int], None]


class MessageFormat(NamedTuple):
    """Of what is brought, the same on all ranks. kind: the collective's name.  rows: how many each
    rank brings. length: of a row.  at: where in its room each rank has it already, in bytes; 0: it
    is brought there."""

    kind: str
    dtype: torch.dtype
    rows: tuple[int, ...]
    length: int
    at: int = 0


class Chunk(NamedTuple):
    """Columns [lo, hi) of the message with this number, in one meeting.

    is_whole: all columns.  rows: that this rank brings.  mine, parts, starts: where they lie, by
    half: a view of this rank's, one of each row of all ranks, and by rank in bytes."""

    message: int
    lo: int
    hi: int
    is_whole: bool
    rows: int
    mine: tuple[torch.Tensor, ...]
    parts: tuple[Tensors, ...]
    starts: tuple[list[int], ...]


class Work:
    """One collective, as torch.distributed's. mine: what this rank brings, flat: rows of one
    length.

    of: a number for what it is about, which is to be the same on all ranks; 0 where its shape says
    enough. meet: makes all that were begun.  fold: called with all ranks' rows, for the columns
    [lo, hi): it leaves the result where it is wanted."""

    __slots__ = ("fold", "is_finished", "is_met", "meet", "mine", "of", "shape")

    def __init__(
        self,
        meet: Callable[[], None],
        shape: MessageFormat,
        mine: torch.Tensor,
        fold: CombineFunction,
        of: int = 0,
    ) -> None:
        self.meet, self.shape, self.mine, self.fold, self.of = meet, shape, mine, fold, of
        self.is_met = self.is_finished = False

    def bring(self, piece: Chunk, half: int) -> None:
        """What this rank has of these columns, into its place."""
        if piece.rows:
            columns, place = self.mine, piece.mine[half]
            if not piece.is_whole:
                columns = columns.view(piece.rows, -1)[:, piece.lo : piece.hi]
                place = place.view(piece.rows, -1)
            place.copy_(columns)

    def take(self, piece: Chunk, half: int) -> None:
        """All ranks' columns, from their places."""
        self.fold(piece.parts[half], piece.lo, piece.hi)

    def is_completed(self) -> bool:
        """Also where it has failed."""
        return self.is_finished

    def wait(self) -> None:
        """Raises RuntimeError where another rank has gone, brings what does not fit, or does not
        come in time.
        """
        if not self.is_finished:
            self.meet()
        if not self.is_met:
            raise RuntimeError("it has failed before")


def copy_all(parts: Tensors, into: Iterable[torch.Tensor]) -> None:
    for part, out in zip(parts, into, strict=True):
        out.copy_(part)


PIECE_BYTES = 1 << 18  # so much of two ranks' vectors stays in the cache of a processor


class InPlaceWork(Work):
    """An all-reduce of vectors that all ranks see: each adds up its slice, for all of them.

    parts: each rank's vector.  It is over after one more meeting: nobody may read what others still
    write."""

    __slots__ = ("parts", "slice")

    def __init__(
        self, meet: Callable[[], None], shape: MessageFormat, parts: Tensors, rank: int
    ) -> None:
        super().__init__(meet, shape, NOTHING, lambda *_: None)
        self.parts = parts
        edges = [
            shape.length * place // len(parts) // CACHE_LINE_BYTES * CACHE_LINE_BYTES
            for place in range(len(parts))
        ] + [shape.length]
        self.slice = edges[rank], edges[rank + 1]

    def bring(self, piece: Chunk, half: int) -> None:
        """It is there."""

    def take(self, piece: Chunk, half: int) -> None:
        (begin, end), width = self.slice, PIECE_BYTES // self.shape.dtype.itemsize
        for lo in range(begin, end, width):
            first, *others = [part[lo : min(lo + width, end)] for part in self.parts]
            for other in others:
                first.add_(other)
            for other in others:
                other.copy_(first)


NOTHING = torch.empty(0)


class ScalarSumWork(Work):
    """A few numbers to add in float64: a tensor of them would cost more than all the rest."""

    __slots__ = ("form", "memory", "rank", "sums", "values")

    def __init__(
        self,
        meet: Callable[[], None],
        values: list[float],
        memory: mmap.mmap,
        rank: int,
        rows: tuple[int, ...],
    ) -> None:
        shape = MessageFormat("numbers", torch.float64, rows, len(values))
        super().__init__(meet, shape, NOTHING, lambda *_: None)
        self.values, self.memory, self.rank, self.form = values, memory, rank, f"{len(values)}d"

    def bring(self, piece: Chunk, half: int) -> None:
        struct.pack_into(self.form, self.memory, piece.starts[half][self.rank], *self.values)

    def take(self, piece: Chunk, half: int) -> None:
        rows = [struct.unpack_from(self.form, self.memory, start) for start in piece.starts[half]]
        self.sums = list(rows[0])
        for row in rows[1:]:
            self.sums = list(map(add, self.sums, row))

    def found(self) -> list[float]:
        """The sums over all ranks, in their order."""
        return self.sums
