"""Local files: what data commands read and write, and the feedback that the user sees meanwhile."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stepladder.core import durable
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.typed_file import open_to_read

FULL_DISK_HINT = (
    "free some space or choose another folder with --data-dir DIR, then type the command again"
)


@dataclass(frozen=True)
class Feedback:
    """Two functions that show the progress of a long operation; by default they do nothing.

    Args:
        on_progress: Called with a name, the number of finished units, and the total number.
        on_message: Called with one line of text.
    """

    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None
    on_message: Callable[[str], None] = lambda line: None


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def output_folder(path: Path) -> Iterator[None]:
    """Make a folder for the block; remove what was made if it is still empty at the end."""
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    with durable.name_write_errors(path, "another folder"):
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # a folder that is not empty stays
            for folder in created:
                folder.rmdir()


def validate_readable(path: Path, max_bytes: int | None = None) -> None:
    """Check that a path is a regular file that can be read.

    Opening a FIFO would block, and /dev/zero has no end.

    Args:
        path: The path that the user gave.
        max_bytes: The largest size to accept, for a file that is read into memory.

    Raises:
        InputError: The path is something else, cannot be read, or is too large.
    """
    with (
        as_input_error(
            f"cannot read {path}", "give a file that can be read", (OSError, ValueError)
        ),
        open_to_read(path) as file,
    ):
        size = os.fstat(file.fileno()).st_size
    if max_bytes is not None and size > max_bytes:
        raise InputError(
            f"{path} has {size:,} bytes, more than {max_bytes:,}", "give a smaller file"
        )


def make_change_error(name: object) -> InputError:
    """Return the error for a file that is no longer the one that was opened as data."""
    return InputError(f"{name} has changed since it was opened", "start again")


def find_gzip_or_plain(folder: Path, *names: str) -> Path | None:
    """Return the first of these files that exists, as NAME.gz or NAME, or None.

    NAME.gz comes first, because `stepladder data get` checks and replaces that one.

    Raises:
        InputError: Both are there, and NAME.gz is not the other one compressed.
    """
    for name in names:
        compressed = folder / f"{name}.gz"
        plain = folder / name
        if compressed.is_file():
            if plain.is_file() and not _is_compressed(plain, compressed):
                raise InputError(f"{compressed} and {plain} differ", "one of them")
            return compressed
        if plain.is_file():
            return plain
    return None


def _is_compressed(plain: Path, compressed: Path) -> bool:
    """Return whether a file of gzip ends with the checksum and the length of another file."""
    data = plain.read_bytes()
    trailer = struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
    return compressed.read_bytes().endswith(trailer)


def open_locked(path: Path) -> io.FileIO:
    """Open a file for appending, with an exclusive lock where the file system has locks.

    Returns:
        The open file, which holds the lock until it is closed.

    Raises:
        InputError: Another process is writing the file.
    """
    while True:
        file = io.FileIO(path, "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            hint = "wait for it, then type the command again"
            raise InputError(f"{path} is being written by another process", hint) from None
        except OSError:
            pass  # some cluster file systems have no locks; writing without one beats no writing
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        # The writer before us has renamed or removed the file between our open and our lock.
        file.close()
