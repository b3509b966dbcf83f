"""A file that only one process may write, a disk that takes no more, and what a person hears meanwhile."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.errors import InputError

MAKE_ROOM = "make room or choose another place with --data-dir DIR, then type the command again"


@dataclass(frozen=True)
class Feedback:
    """Silent unless told otherwise. progress: a name, how much is done, and how much there is.  say: a line."""

    progress: Callable[[str, int, int], None] = lambda name, done, total: None
    say: Callable[[str], None] = lambda line: None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gz_or_plain(folder: Path, *names: str) -> Path | None:
    """The first of these files that is there. The .gz comes first: that is the one `data get` checks and mends."""
    paths = [folder / f"{name}{end}" for name in names for end in (".gz", "")]
    return next((path for path in paths if path.is_file()), None)


def open_locked(path: Path) -> io.FileIO:
    """Open for appending, alone. InputError when another process is writing it."""
    while True:
        out = io.FileIO(path, "a+")
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            out.close()
            hint = "wait for it, then type the command again"
            raise InputError(f"{path} is being written by another process", hint) from None
        except OSError:
            pass  # some cluster file systems have no locks: better without than not at all
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(out.fileno())):
                return out
        out.close()  # the one before us renamed or removed it between our open and our lock
