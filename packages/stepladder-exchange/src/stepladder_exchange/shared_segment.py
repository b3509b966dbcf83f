"""Memory that the ranks of one machine share: one of them makes it, and each of them maps it.

It has no name by which other processes could open it, and is freed with the last process that has
it. Each rank has one slot in it, which holds words, two halves, and an arena.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress

MAX_SLOTS = 8  # each rank reads the slots of all others: with more ranks a ring moves less
WORDS_PER_SLOT = 64  # of 8 bytes; so many that no two ranks write to one line of a cache
HALF_BYTES = 1 << 19  # of each of a slot's two halves, which are used in turn
ARENA_OFFSET = 8 * WORDS_PER_SLOT + 2 * HALF_BYTES  # where a slot's arena begins
ARENA_BYTES = 1 << 34  # for vectors that stay; only what is written takes memory
SLOT_BYTES = ARENA_OFFSET + ARENA_BYTES


def can_share_memory(num_ranks: int) -> bool:
    """Tell whether so many ranks of one machine exchange tensors through shared memory.

    On processors other than x86-64 a number may be visible before the data that it announces.

    Returns:
        True on Linux on x86-64, for 2 to MAX_SLOTS ranks.
    """
    is_supported = sys.platform == "linux" and platform.machine() == "x86_64"
    return is_supported and 1 < num_ranks <= MAX_SLOTS


def make_segment(num_ranks: int) -> int | None:
    """Make a file as large as the ranks need; only what is written takes memory.

    Returns:
        The file descriptor, which the caller closes; None if the ranks should use gloo, or if this
        machine has no such memory.
    """
    if not can_share_memory(num_ranks):
        return None
    with suppress(OSError):
        segment = os.memfd_create("stepladder")
        try:
            os.ftruncate(segment, num_ranks * SLOT_BYTES)
        except OSError:  # a limit for the size of files, which counts what is not written too
            os.close(segment)
            return None
        return segment
    return None
