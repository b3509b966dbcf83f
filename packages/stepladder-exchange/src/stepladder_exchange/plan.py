"""How messages are divided into exchanges, and at which bytes of the shared memory they lie."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch

from stepladder_exchange.shared_segment import ARENA_OFFSET, HALF_BYTES, SLOT_BYTES, WORDS_PER_SLOT
from stepladder_exchange.work import CACHE_LINE_BYTES, Chunk, MessageFormat, Tensors

FIRST_HALF_OFFSET = 8 * WORDS_PER_SLOT  # bytes from the beginning of a slot to its first half


class Halves(NamedTuple):
    """The position and size of the two halves of a slot, which exchanges use in turn.

    Args:
        offset: Bytes from the beginning of a slot to its first half.
        size: Bytes of a half.
    """

    offset: int
    size: int


SMALL_HALVES = Halves(FIRST_HALF_OFFSET, HALF_BYTES)  # small enough for a core's cache


def make_large_halves(size: int) -> Halves:
    """Return halves of `size` bytes at the end of a slot, where the end of the arena would be.

    Large halves need fewer exchanges, which is faster where ranks share cores.
    """
    return Halves(SLOT_BYTES - 2 * size, size)


class Exchange(NamedTuple):
    """One exchange: the chunks that the ranks write and read, and a digest of all messages."""

    digest: int
    chunks: list[Chunk]


class ExchangePlanner:
    """Plans the exchanges of one rank in shared memory that has a slot for each rank."""

    def __init__(
        self, memory: torch.Tensor, rank: int, ranks: int, large_halves: Halves = SMALL_HALVES
    ) -> None:
        """Create the planner of a rank.

        Args:
            memory: The shared memory of all ranks, as bytes.
            rank: This rank.
            ranks: How many ranks have a slot.
            large_halves: The halves for messages that do not fit into the small ones.
        """
        self.memory = memory
        self.rank = rank
        self.ranks = ranks
        self.large_halves = large_halves

    def plan(self, formats: tuple[MessageFormat, ...]) -> list[Exchange]:
        """Return the exchanges that messages of these formats need, in order."""
        exchanges: list[list[Chunk]] = [[]]
        for index, message_format in enumerate(formats):
            if message_format.arena_offset:
                exchanges[0].append(Chunk(index, 0, 0, True, 0, (), (), ()))
        has_in_place = bool(exchanges[0])
        halves = self._choose_halves(formats)
        used_bytes = 0  # of a half, by the last exchange
        for index, message_format in enumerate(formats):
            if message_format.arena_offset:
                continue
            column_bytes = _count_column_bytes(message_format)
            lo = 0
            while lo < message_format.row_length:
                remaining = message_format.row_length - lo
                width = min(remaining, (halves.size - used_bytes) // column_bytes)
                if width < remaining and used_bytes:
                    exchanges.append([])
                    used_bytes = 0
                    continue
                chunk = self._make_chunk(
                    index,
                    message_format,
                    lo,
                    lo + width,
                    halves._replace(offset=halves.offset + used_bytes),
                )
                exchanges[-1].append(chunk)
                lo += width
                used_bytes += round_up_to_cache_line(width * column_bytes)
        if has_in_place and len(exchanges) == 1:
            # All ranks have added their slices only when they reach this second, empty exchange.
            exchanges.append([])
        digest = zlib.crc32(repr(formats).encode())
        return [Exchange(digest, chunks) for chunks in exchanges]

    def _choose_halves(self, formats: tuple[MessageFormat, ...]) -> Halves:
        """Return the small halves if all messages fit into one exchange, else the large ones."""
        needed_bytes = sum(
            round_up_to_cache_line(message.row_length * _count_column_bytes(message))
            for message in formats
            if not message.arena_offset
        )
        return SMALL_HALVES if needed_bytes <= HALF_BYTES else self.large_halves

    def _make_chunk(
        self, index: int, message_format: MessageFormat, lo: int, hi: int, halves: Halves
    ) -> Chunk:
        """Return the chunk of columns [lo, hi) that begins where the halves do."""
        width = hi - lo
        lengths = [count * width for count in message_format.rows_per_rank]
        offsets = []
        own_views = []
        row_views = []
        for half in range(2):
            first = halves.offset + halves.size * half
            half_offsets = [SLOT_BYTES * rank + first for rank in range(self.ranks)]
            views = self.make_views(half_offsets, message_format.dtype, lengths)
            offsets.append(half_offsets)
            own_views.append(views[self.rank])
            row_views.append([row for view in views if len(view) for row in view.split(width)])
        return Chunk(
            message=index,
            lo=lo,
            hi=hi,
            is_whole=width == message_format.row_length,
            row_count=message_format.rows_per_rank[self.rank],
            own_views=tuple(own_views),
            row_views=tuple(row_views),
            offsets=tuple(offsets),
        )

    def make_arena_views(self, begin: int, dtype: torch.dtype, length: int) -> Tensors:
        """Return each rank's vector that begins at byte `begin` of the ranks' arenas."""
        offsets = [SLOT_BYTES * rank + ARENA_OFFSET + begin for rank in range(self.ranks)]
        return self.make_views(offsets, dtype, [length] * self.ranks)

    def make_views(self, offsets: list[int], dtype: torch.dtype, lengths: list[int]) -> Tensors:
        """Return views of the memory, each with an offset in bytes and a length in elements."""
        return [
            self.memory[offset : offset + length * dtype.itemsize].view(dtype)
            for offset, length in zip(offsets, lengths, strict=True)
        ]


def _count_column_bytes(message_format: MessageFormat) -> int:
    """Return the bytes that one column of a message takes in a slot."""
    return max(message_format.rows_per_rank) * message_format.dtype.itemsize


def round_up_to_cache_line(size: int) -> int:
    """Return the next multiple of a cache line's bytes."""
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
