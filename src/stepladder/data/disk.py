"""A file that only one process may write, a disk that takes no more, and what a person hears
meanwhile.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stepladder.core import durable
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.typed_file import open_to_read

MAKE_ROOM = "make room or choose another place with --data-dir DIR, then type the command again"


@dataclass(frozen=True)
class Feedback:
    """Silent unless told otherwise. progress: a name, how much is done, and how much there is.
    say: a line.
    """

    progress: Callable[[str, int, int], None] = lambda name, done, total: None
    say: Callable[[str], None] = lambda line: None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def filled_folder(path: Path, hint: str) -> Iterator[None]:
    """The folder is there in the block. Where nothing came into it, what was made for it goes
    again.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    with durable.name_write_errors(path, hint):
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty, as it should be
            for folder in made:
                folder.rmdir()


def refuse_no_file(path: Path, most: int | None = None) -> None:
    """Raises InputError for what is no file, or none that can be read: a FIFO would wait, and
    /dev/zero never end.

    most: bytes that it may have, since all of it is read.
    """
    with (
        as_input_error(
            f"cannot read {path}", "give a file that can be read", (OSError, ValueError)
        ),
        open_to_read(path) as file,
    ):
        size = os.fstat(file.fileno()).st_size
    if most is not None and size > most:
        raise InputError(f"{path} has {size:,} bytes, more than {most:,}", "give a smaller file")


def gz_or_plain(folder: Path, *names: str) -> Path | None:
    """The first of these files that is there. The .gz comes first: that is the one `data get`
    checks and mends.
    """
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
