"""How messages are divided into exchanges, and at which bytes of the shared memory they lie."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch

from stepladder.exchange.work import (
    CACHE_LINE_BYTES,
    Chunk,
    MessageFormat,
    Tensors,
)
from stepladder.rank.shared_segment import ARENA_OFFSET, HALF_BYTES, SLOT_BYTES, WORDS_PER_SLOT

FIRST_HALF_OFFSET = 8 * WORDS_PER_SLOT  # bytes from the beginning of a slot to its first half


class Exchange(NamedTuple):
    """One exchange: the chunks that the ranks write and read, and a digest of all messages."""

    digest: int
    chunks: list[Chunk]


class ExchangePlanner:
    """Plans the exchanges of one rank in shared memory that has a slot for each rank."""

    def __init__(
        self,
        memory: torch.Tensor,
        rank: int,
        ranks: int,
    ) -> None:
        """Create the planner of a rank.

        Args:
            memory: The shared memory of all ranks, as bytes.
            rank: This rank.
            ranks: How many ranks have a slot.
        """
        self.memory = memory
        self.rank = rank
        self.ranks = ranks

    def plan(self, formats: tuple[MessageFormat, ...]) -> list[Exchange]:
        """Return the exchanges that messages of these formats need, in order."""
        exchanges: list[list[Chunk]] = [[]]
        for index, message_format in enumerate(formats):
            if message_format.arena_offset:
                exchanges[0].append(Chunk(index, 0, 0, True, 0, (), (), ()))
        has_in_place = bool(exchanges[0])
        used_bytes = 0  # of a half, by the last exchange
        for index, message_format in enumerate(formats):
            if message_format.arena_offset:
                continue
            column_bytes = max(message_format.rows_per_rank) * message_format.dtype.itemsize
            lo = 0
            while lo < message_format.row_length:
                remaining = message_format.row_length - lo
                width = min(remaining, (HALF_BYTES - used_bytes) // column_bytes)
                if width < remaining and used_bytes:
                    exchanges.append([])
                    used_bytes = 0
                    continue
                chunk = self._make_chunk(
                    index,
                    message_format,
                    lo,
                    lo + width,
                    used_bytes,
                )
                exchanges[-1].append(chunk)
                lo += width
                used_bytes += round_up_to_cache_line(width * column_bytes)
        if has_in_place and len(exchanges) == 1:
            exchanges.append([])  # before it, no rank may read what its peers still write
        digest = zlib.crc32(repr(formats).encode())
        return [Exchange(digest, chunks) for chunks in exchanges]

    def _make_chunk(
        self,
        index: int,
        message_format: MessageFormat,
        lo: int,
        hi: int,
        begin: int,
    ) -> Chunk:
        """Return the chunk of columns [lo, hi) that begins at byte `begin` of each half."""
        width = hi - lo
        lengths = [count * width for count in message_format.rows_per_rank]
        offsets = []
        own_views = []
        row_views = []
        for half in range(2):
            first = FIRST_HALF_OFFSET + HALF_BYTES * half + begin
            half_offsets = [SLOT_BYTES * rank + first for rank in range(self.ranks)]
            views = self.make_views(
                half_offsets,
                message_format.dtype,
                lengths,
            )
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

    def make_arena_views(
        self,
        begin: int,
        dtype: torch.dtype,
        length: int,
    ) -> Tensors:
        """Return each rank's vector that begins at byte `begin` of the ranks' arenas."""
        offsets = [SLOT_BYTES * rank + ARENA_OFFSET + begin for rank in range(self.ranks)]
        return self.make_views(offsets, dtype, [length] * self.ranks)

    def make_views(
        self,
        offsets: list[int],
        dtype: torch.dtype,
        lengths: list[int],
    ) -> Tensors:
        """Return views of the memory, each with an offset in bytes and a length in elements."""
        return [
            self.memory[offset : offset + length * dtype.itemsize].view(dtype)
            for offset, length in zip(offsets, lengths, strict=True)
        ]


def round_up_to_cache_line(size: int) -> int:
    """Return the next multiple of a cache line's bytes."""
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
