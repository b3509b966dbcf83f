"""How long a thread that could compute has waited for a core, in Linux's own word."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, nanoseconds in the queue for one, turns


class Queue:
    """Of the thread that makes it. A look costs a few microseconds."""

    def __init__(self, file: Path = SCHEDSTAT) -> None:
        self.file = -1
        with suppress(OSError):
            self.file = os.open(file, os.O_RDONLY)

    def seconds(self) -> float:
        """Since the thread's start; NaN where the kernel does not say it."""
        words = os.pread(self.file, 80, 0).split() if self.file >= 0 else []
        return int(words[1]) / 1e9 if len(words) > 1 else math.nan
