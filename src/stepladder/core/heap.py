"""Memory that a step frees is kept for the next one."""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MAX_FREE_BYTES = 128 * 2**20
MAX_BLOCK_BYTES = 32 * 2**20  # malloc takes no larger block from its heap
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let malloc keep up to 128 MB of freed memory.

    Does nothing without glibc, or if the user has set malloc's thresholds. By itself malloc gives
    gradients of a few megabytes back to the kernel at each step's end, and the next step waits for
    new pages: at a million weights, for a third of its time.
    """
    if any(name in os.environ for name in USER_SETTINGS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # To set either one stops malloc from changing both by itself.
        mallopt(M_TRIM_THRESHOLD, MAX_FREE_BYTES)
        mallopt(M_MMAP_THRESHOLD, MAX_BLOCK_BYTES)
