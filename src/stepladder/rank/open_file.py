"""Files and pipes without a name that a launcher and its ranks share.

They lie in memory, so they do not depend on a file system that is full, read-only or gone, and no
other process can open them.
"""

from __future__ import annotations

import os
import weakref
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any


class OpenFile:
    """A file descriptor that can be an argument of a process that multiprocessing starts.

    Args:
        number: The file descriptor.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_open_file, (DupFd(self.number),)

    def close(self) -> None:
        """Close the file in this process."""
        os.close(self.number)


def _rebuild_open_file(duplicate: Any) -> OpenFile:
    return OpenFile(duplicate.detach())


class MemoryFile:
    """An empty file in memory, which lives as long as this object.

    A program that a rank becomes by exec inherits no descriptor, but it has the path.
    """

    def __init__(self, name: str) -> None:
        number = os.memfd_create(name)
        # Every process of the same user can open the file by it, while this process lives.
        self.path = Path(f"/proc/{os.getpid()}/fd/{number}")
        weakref.finalize(self, os.close, number).atexit = False
