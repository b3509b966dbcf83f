"""Files and pipes without a name that a launcher and its ranks share.

They lie in memory, so no full, read-only or vanished file system reaches them, and nobody else can
open them."""

from __future__ import annotations

import os
import weakref
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any


class OpenFile:
    """A file descriptor that can be an argument of a process that multiprocessing starts."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.number),)

    def close(self) -> None:
        os.close(self.number)


def _received(sent: Any) -> OpenFile:
    return OpenFile(sent.detach())


class MemoryFile:
    """An empty file in memory, which lives as long as this object.

    path: by it every process of the same user opens the file, while the process that made it lives.
    A program that a rank becomes keeps no descriptor of the rank's, but it has the path."""

    def __init__(self, name: str) -> None:
        number = os.memfd_create(name)
        self.path = Path(f"/proc/{os.getpid()}/fd/{number}")
        weakref.finalize(self, os.close, number).atexit = False
