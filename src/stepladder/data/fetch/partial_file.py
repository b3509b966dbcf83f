"""The file that a download is written to until it is complete."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

from stepladder.core import durable
from stepladder.data.fetch.catalog import RemoteFile
from stepladder.data.local_files import FULL_DISK_HINT, Feedback, open_locked

TRANSFER_BYTES = 1 << 18  # that are read at once


class SourceError(Exception):
    """Raised when a mirror or a local copy does not have the right file; the text is the reason."""


class BrokenTransfer(SourceError):
    """Raised when a transfer stops before its end; another attempt may succeed."""


class PartialFile:
    """The file NAME.part in a folder, locked until it is closed.

    It gets its final name when it is complete and right, and is removed otherwise. A full disk, an
    unwritable folder and a second writer raise InputError.
    """

    def __init__(self, file: RemoteFile, folder: Path) -> None:
        """Create and lock the file; what a killed process left in it is dropped."""
        self.file = file
        self.path = folder / f"{file.name}.part"
        self.final_path = folder / file.name
        self.is_complete = False
        self.size = 0
        self._hash = hashlib.sha256()
        with durable.name_write_errors(self.path, FULL_DISK_HINT):
            self._stream: io.FileIO = open_locked(self.path)
        self.restart()

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_complete:
            self.path.unlink(missing_ok=True)
        self._stream.close()

    def restart(self) -> None:
        """Drop all bytes."""
        with durable.name_write_errors(self.path, FULL_DISK_HINT):
            self._stream.truncate(0)
        self._hash = hashlib.sha256()
        self.size = 0

    def fill(self, read: Callable[[int], bytes], feedback: Feedback) -> None:
        """Write all that `read` returns, and give the file its final name.

        Raises:
            SourceError: The bytes are not those of the file; BrokenTransfer if there are too few.
        """
        while chunk := read(TRANSFER_BYTES):
            self._append(chunk)
            feedback.on_progress(self.file.name, self.size, self.file.bytes)
        self._finish()

    def _append(self, chunk: bytes) -> None:
        if self.size + len(chunk) > self.file.bytes:
            raise SourceError(f"more than the {self.file.bytes:,} bytes expected")
        remaining = memoryview(chunk)
        with durable.name_write_errors(self.path, FULL_DISK_HINT):
            while remaining:  # the stream is unbuffered: a write may take only the first bytes
                count = self._stream.write(remaining)
                remaining = remaining[count:]
        self._hash.update(chunk)
        self.size += len(chunk)

    def _finish(self) -> None:
        if self.size < self.file.bytes:
            raise BrokenTransfer(f"stopped after {self.size:,} of {self.file.bytes:,} bytes")
        if self._hash.hexdigest() != self.file.sha256:
            raise SourceError("the sha256 is wrong")
        with durable.name_write_errors(self.final_path, FULL_DISK_HINT):
            durable.move(self.path, self.final_path)
        self.is_complete = True
