"""The work of one collective in shared memory: what a rank writes into its slot and what it reads.

`shared_memory.py` calls `write` of each queued collective before an exchange, and `read` after it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from operator import add
from typing import NamedTuple

import torch

from stepladder_exchange.reduction import Reduction

CACHE_LINE_BYTES = 64  # a message begins at a multiple of it
SLICE_ALIGNMENT = 64  # elements; the slices of an in-place all-reduce begin at multiples of it
REDUCE_CHUNK_BYTES = 1 << 18  # this much of two ranks' vectors fits into a processor's cache

NO_TENSOR = torch.empty(0)

Tensors = list[torch.Tensor]
CombineFunction = Callable[[Tensors, int, int], None]


class MessageFormat(NamedTuple):
    """The format of what all ranks contribute to a collective; it is the same on every rank.

    Args:
        kind: What errors call it: the name of the collective, of its reduction, and of its root.
            After "of" it also says what the ranks contribute.
        dtype: The type of the elements.
        rows_per_rank: How many rows each rank contributes.
        row_length: Elements of a row.
        arena_offset: Bytes from the beginning of a slot to the rank's data, if the data lie in the
            arena already; 0 if they must be written into the slot.
    """

    kind: str
    dtype: torch.dtype
    rows_per_rank: tuple[int, ...]
    row_length: int
    arena_offset: int = 0


class Chunk(NamedTuple):
    """Columns [lo, hi) of one message, which fit into one exchange.

    The last three fields have an entry for each of the two halves of a slot.

    Args:
        message: The index of the message among those of the exchange.
        lo: The first column.
        hi: The column after the last one.
        is_whole: Whether these are all columns of the message.
        row_count: How many rows this rank contributes.
        own_views: A view of this rank's columns in its slot.
        row_views: A view of each row of all ranks.
        offsets: By rank, the bytes from the beginning of the memory to the rank's columns.
    """

    message: int
    lo: int
    hi: int
    is_whole: bool
    row_count: int
    own_views: tuple[torch.Tensor, ...]
    row_views: tuple[Tensors, ...]
    offsets: tuple[list[int], ...]


class Work:
    """One collective that was started, with the methods of torch.distributed's Work."""

    __slots__ = ("combine", "exchange", "format", "has_result", "is_finished", "tag", "tensor")

    def __init__(
        self,
        exchange: Callable[[], None],
        message_format: MessageFormat,
        tensor: torch.Tensor,
        combine: CombineFunction,
        tag: int = 0,
    ) -> None:
        """Create the work of a collective.

        Args:
            exchange: Runs all collectives that were started.
            message_format: The format of what the ranks contribute.
            tensor: Flat; what this rank contributes, row by row.
            combine: Called with all ranks' rows for the columns [lo, hi); it stores the result.
            tag: Must be the same on all ranks; tells apart collectives of one format.
        """
        self.exchange = exchange
        self.format = message_format
        self.tensor = tensor
        self.combine = combine
        self.tag = tag
        self.is_finished = False  # with a result or an error
        self.has_result = False

    def write(self, chunk: Chunk, half: int) -> None:
        """Copy this rank's columns into its slot."""
        if chunk.row_count:
            columns = self.tensor
            target = chunk.own_views[half]
            if not chunk.is_whole:
                columns = columns.view(chunk.row_count, -1)[:, chunk.lo : chunk.hi]
                target = target.view(chunk.row_count, -1)
            target.copy_(columns)

    def read(self, chunk: Chunk, half: int) -> None:
        """Combine the columns of all ranks from their slots."""
        self.combine(chunk.row_views[half], chunk.lo, chunk.hi)

    def is_completed(self) -> bool:
        """Return whether the collective has ended, with a result or an error."""
        return self.is_finished

    def wait(self) -> None:
        """Run all collectives that were started, unless this one has run.

        Raises:
            RuntimeError: A rank has ended or left the group, contributes something that does not
                fit, or did not arrive in time.
        """
        if not self.is_finished:
            self.exchange()
        if not self.has_result:
            raise RuntimeError("the collective has failed before")


class RowsWork(Work):
    """A collective to which a rank contributes rows that are tensors of their own.

    A row may be shorter than the format says; what follows it is undefined.
    """

    __slots__ = ("rows",)

    def __init__(
        self,
        exchange: Callable[[], None],
        message_format: MessageFormat,
        rows: Sequence[torch.Tensor],
        combine: CombineFunction,
        tag: int = 0,
    ) -> None:
        """Create the work of a collective; `rows` are this rank's rows, each of them flat."""
        super().__init__(exchange, message_format, NO_TENSOR, combine, tag)
        self.rows = rows

    def write(self, chunk: Chunk, half: int) -> None:
        """Copy this rank's columns into its slot."""
        width = chunk.hi - chunk.lo
        slot = chunk.own_views[half]
        for index, row in enumerate(self.rows):
            columns = row[chunk.lo : chunk.hi]
            begin = index * width
            slot[begin : begin + len(columns)].copy_(columns)


def copy_all(sources: Tensors, targets: Iterable[torch.Tensor]) -> None:
    """Copy each source into its target."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def combine_nothing(*_: object) -> None:
    """Do nothing: the classes below read the slots themselves."""


class InPlaceWork(Work):
    """An all-reduce of vectors that lie in shared memory: each rank adds one slice, for all ranks.

    It needs one more exchange at its end, before which no rank may read what its peers still write.
    """

    __slots__ = ("hi", "lo", "vectors")

    def __init__(
        self,
        exchange: Callable[[], None],
        message_format: MessageFormat,
        vectors: Tensors,
        rank: int,
    ) -> None:
        super().__init__(exchange, message_format, NO_TENSOR, combine_nothing)
        self.vectors = vectors
        length = message_format.row_length
        ranks = len(vectors)
        self.lo = length * rank // ranks // SLICE_ALIGNMENT * SLICE_ALIGNMENT
        self.hi = length
        if rank + 1 < ranks:
            self.hi = length * (rank + 1) // ranks // SLICE_ALIGNMENT * SLICE_ALIGNMENT

    def write(self, chunk: Chunk, half: int) -> None:
        """Do nothing: the vectors are in shared memory already."""

    def read(self, chunk: Chunk, half: int) -> None:
        """Add this rank's slice of all vectors, and copy the sum into each of them."""
        step = REDUCE_CHUNK_BYTES // self.format.dtype.itemsize
        for lo in range(self.lo, self.hi, step):
            hi = min(lo + step, self.hi)
            total, *addends = [vector[lo:hi] for vector in self.vectors]
            for addend in addends:
                total.add_(addend)
            for addend in addends:
                addend.copy_(total)


class SlicedReduceWork(Work):
    """An all-reduce of a large tensor: each rank reduces one slice of it for all ranks.

    In each exchange a rank sends the next columns of its peers' slices, and the columns of its own
    slice that it has reduced after the exchange before. So the last exchange has only results. The
    exchanges must be the only ones of their batch: the results are written where the next begins.
    """

    __slots__ = ("rank", "reduction", "slices", "width")

    def __init__(
        self,
        exchange: Callable[[], None],
        reduction: Reduction,
        slices: Tensors,
        rank: int,
        half_bytes: int,
    ) -> None:
        """Create the work of an all-reduce.

        Args:
            exchange: Runs all collectives that were started.
            reduction: What to do with the numbers of the ranks.
            slices: The slices of this rank's tensor, one for each rank; the first is the longest.
            rank: This rank.
            half_bytes: The bytes of the half of a slot in which the exchanges take place.
        """
        ranks = len(slices)
        dtype = slices[0].dtype
        self.width = half_bytes // (ranks * dtype.itemsize)
        exchanges = -(-len(slices[0]) // self.width) + 1
        message_format = MessageFormat(
            f"all_reduce {reduction.name} of {sum(map(len, slices))} numbers",
            dtype,
            (ranks,) * ranks,
            exchanges * self.width,
        )
        super().__init__(exchange, message_format, NO_TENSOR, combine_nothing)
        self.reduction = reduction
        self.slices = slices
        self.rank = rank

    def write(self, chunk: Chunk, half: int) -> None:
        """Copy this rank's columns of its peers' slices into its slot."""
        rows = chunk.own_views[half].split(self.width)
        for peer, part in enumerate(self.slices):
            columns = part[chunk.lo : chunk.hi]
            if peer != self.rank and len(columns):
                rows[peer][: len(columns)].copy_(columns)

    def read(self, chunk: Chunk, half: int) -> None:
        """Take the results of the exchange before, and reduce the next columns of the own slice.

        No peer reads the other half of the slot any more: all have come to this exchange.
        """
        ranks = len(self.slices)
        rows = chunk.row_views[half]
        if chunk.lo:
            for peer, part in enumerate(self.slices):
                columns = part[chunk.lo - self.width : chunk.lo]
                if peer != self.rank and len(columns):
                    columns.copy_(rows[peer * ranks + peer][: len(columns)])
        own = self.slices[self.rank][chunk.lo : chunk.hi]
        if len(own):
            addends = [row[: len(own)] for row in rows[self.rank :: ranks]]
            addends[self.rank] = own
            result = chunk.own_views[1 - half].split(self.width)[self.rank][: len(own)]
            self.reduction.reduce(addends, result)
            own.copy_(result)


class ScalarSumWork(Work):
    """The sum of a few float64 numbers; a tensor would cost more than the whole exchange."""

    __slots__ = ("layout", "memory", "rank", "sums", "values")

    def __init__(
        self,
        exchange: Callable[[], None],
        values: list[float],
        memory: mmap.mmap,
        rank: int,
        rows_per_rank: tuple[int, ...],
    ) -> None:
        message_format = MessageFormat("numbers", torch.float64, rows_per_rank, len(values))
        super().__init__(exchange, message_format, NO_TENSOR, combine_nothing)
        self.values = values
        self.memory = memory
        self.rank = rank
        self.layout = f"{len(values)}d"
        self.sums = values  # replaced by `read`

    def write(self, chunk: Chunk, half: int) -> None:
        """Write this rank's numbers into its slot."""
        struct.pack_into(self.layout, self.memory, chunk.offsets[half][self.rank], *self.values)

    def read(self, chunk: Chunk, half: int) -> None:
        """Add the numbers of all ranks, in rank order."""
        rows = [
            struct.unpack_from(self.layout, self.memory, offset) for offset in chunk.offsets[half]
        ]
        sums = list(rows[0])
        for row in rows[1:]:
            sums = list(map(add, sums, row))
        self.sums = sums

    def result(self) -> list[float]:
        """Return the sums over all ranks, in the order of the numbers."""
        return self.sums
