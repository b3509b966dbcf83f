"""Memory that a step frees is kept for the next one."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MOST_KEPT, LARGEST_BLOCK = (
    128 * 2**20,
    32 * 2**20,
)  # bytes; malloc takes no larger block from its heap


def keep_freed_memory() -> None:
    """Have malloc keep up to 128 MB of freed memory. Does nothing without glibc, or where the user
    has set it.

    By itself it gives gradients of a few megabytes back to the kernel at each step's end, and the
    next step waits for new pages: at a million weights, for a third of its time."""
    if any(
        name in os.environ
        for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(
            M_TRIM_THRESHOLD, MOST_KEPT
        )  # to set either stops malloc from changing both by itself
        mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
