"""A file on its way: `<name>.part`, hashed while it grows and renamed only when it is right."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stepladder.core import durable
from stepladder.data.disk import MAKE_ROOM, open_locked
from stepladder.data.fetch.catalog import RemoteFile


class SourceError(Exception):
    """A mirror or a local copy could not give the file; the text is the reason."""


class CutShortError(SourceError):
    """The bytes stopped early. What came stays in the .part file."""


class WrongBytesError(SourceError):
    """All bytes came and are not the right ones. The .part file has been emptied."""


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
        with durable.writing(self.path, MAKE_ROOM):
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
        with durable.writing(self.path, MAKE_ROOM):
            self._out.truncate(0)
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, chunk: bytes) -> None:
        """Append chunk. WrongBytesError when the file grows beyond its known size."""
        if self.size + len(chunk) > self.file.bytes:
            self.restart()
            raise WrongBytesError(f"more than the {self.file.bytes:,} bytes expected")
        rest = memoryview(chunk)
        with durable.writing(self.path, MAKE_ROOM):
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
        with durable.writing(self.final, MAKE_ROOM):
            durable.move(self.path, self.final)
