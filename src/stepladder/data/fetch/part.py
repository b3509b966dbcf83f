"""A file on its way: `<name>.part`, hashed while it grows and renamed only when it is right."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.data.fetch.catalog import RemoteFile


class SourceError(Exception):
    """A mirror or a local copy could not give the file; the text is the reason."""


class CutShortError(SourceError):
    """The bytes stopped early. What came stays in the .part file."""


class WrongBytesError(SourceError):
    """All bytes came and are not the right ones. The .part file has been emptied."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's errors in the block into InputError with path and reason."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}",
            "make room or choose another place with --data-dir DIR, then type the command again",
        ) from error


class Part:
    """The .part file of `file` in `folder`, locked while open; `size` is its bytes so far.

    Opening goes on with the bytes an earlier run left. Full disks, unwritable folders and a second
    writer raise InputError and leave the bytes that were written.
    """

    def __init__(self, file: RemoteFile, folder: Path) -> None:
        self.file = file
        self.final = folder / file.name
        self.path = folder / f"{file.name}.part"

    def __enter__(self) -> Part:
        with writing(self.path):
            self._out = open_locked(self.path)
            self._out.seek(0)
            self._hash = hashlib.file_digest(self._out, "sha256")
            self.size = self._out.tell()
        if self.size > self.file.bytes:
            self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        if self.size == 0:
            self.path.unlink(missing_ok=True)
        self._out.close()

    def restart(self) -> None:
        """Drop all bytes."""
        with writing(self.path):
            self._out.truncate(0)
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, chunk: bytes) -> None:
        """Append chunk. WrongBytesError when the file grows beyond its known size."""
        if self.size + len(chunk) > self.file.bytes:
            self.restart()
            raise WrongBytesError(f"more than the {self.file.bytes:,} bytes expected")
        rest = memoryview(chunk)
        with writing(self.path):
            while rest:  # unbuffered: a disk that fills up takes the first bytes of a chunk only
                taken = self._out.write(rest)
                self._hash.update(rest[:taken])
                self.size += taken
                rest = rest[taken:]

    def place(self) -> None:
        """Give the file its final name. CutShortError or WrongBytesError when it is not whole and right."""
        if self.size < self.file.bytes:
            raise CutShortError(f"stopped after {self.size:,} of {self.file.bytes:,} bytes")
        if self._hash.hexdigest() != self.file.sha256:
            self.restart()
            raise WrongBytesError("the sha256 is wrong")
        with writing(self.final):
            os.fsync(self._out.fileno())
            os.replace(self.path, self.final)  # noqa: PTH105 - the word says what it does here


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
