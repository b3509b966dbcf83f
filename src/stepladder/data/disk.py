"""A file that only one process may write, and what to do where the disk takes no more."""

from __future__ import annotations

import fcntl
import io
import os
from pathlib import Path

from stepladder.core.errors import InputError

MAKE_ROOM = "make room or choose another place with --data-dir DIR, then type the command again"


def open_locked(path: Path) -> io.FileIO:
    """Open for appending, alone. InputError when another process is writing it."""
    while True:
        out = io.FileIO(path, "a+")
        lock(out, path)
        if is_still(path, out):
            return out
        out.close()  # the one before us renamed or removed it between our open and our lock


def is_still(path: Path, out: io.FileIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(out.fileno()))
    except FileNotFoundError:
        return False


def lock(out: io.FileIO, path: Path) -> None:
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        out.close()
        raise InputError(
            f"{path} is being written by another process", "wait for it, then type the command again"
        ) from None
    except OSError:
        pass  # some cluster file systems have no locks: better without than not at all
