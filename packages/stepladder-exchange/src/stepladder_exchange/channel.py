"""A channel from one rank to another: bytes in a ring that both have mapped.

It lies in the arena of the sender's slot, where a process group has no vectors. x86-64 keeps the
order of stores, as shared_memory.py says: who sees the new count sees the bytes before it.
"""

from __future__ import annotations

import mmap

import torch

from stepladder_exchange.shared_segment import ARENA_OFFSET, SLOT_BYTES

COUNTS_BYTES = 4096
RING_BYTES = 1 << 20
MAX_STEP_BYTES = RING_BYTES // 4  # so that one rank reads while the other writes
# The 8-byte words of the counts, each in a cache line of its own: how many bytes have ever been
# written, and how many of them read.
WRITTEN_WORD = 0
READ_WORD = 8


class Channel:
    """Bytes on their way from a sender, which alone calls `write`, to a receiver, which reads."""

    def __init__(self, memory: mmap.mmap, sender: int, receiver: int) -> None:
        """Use the channel between two ranks.

        Args:
            memory: The memory of the group, which was empty when the group was made.
            sender: The rank that sends.
            receiver: The rank that receives.
        """
        begin = SLOT_BYTES * sender + ARENA_OFFSET + (COUNTS_BYTES + RING_BYTES) * receiver
        ring = begin + COUNTS_BYTES
        self._counts = memoryview(memory)[begin:ring].cast("q")
        self._ring = torch.frombuffer(memory, dtype=torch.uint8, count=RING_BYTES, offset=ring)

    def write(self, data: torch.Tensor) -> int:
        """Write the first of these bytes; return how many. Without room for one these are none."""
        written = self._counts[WRITTEN_WORD]
        room = RING_BYTES - (written - self._counts[READ_WORD])
        span = self._find_place(written, min(room, len(data)))
        if len(span):
            span.copy_(data[: len(span)])
            self._counts[WRITTEN_WORD] = written + len(span)
        return len(span)

    def read(self, target: torch.Tensor) -> int:
        """Read the next bytes into the first of a target; return how many. There may be none."""
        read = self._counts[READ_WORD]
        available = self._counts[WRITTEN_WORD] - read
        span = self._find_place(read, min(available, len(target)))
        if len(span):
            target[: len(span)].copy_(span)
            self._counts[READ_WORD] = read + len(span)
        return len(span)

    def _find_place(self, count: int, size: int) -> torch.Tensor:
        """Return the bytes of the ring after so many, up to a size, in one piece."""
        begin = count % RING_BYTES
        return self._ring[begin : min(begin + min(size, MAX_STEP_BYTES), RING_BYTES)]
