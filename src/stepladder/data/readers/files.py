"""The files of a data set: local ones, and those that fsspec reads through a cache."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from operator import eq
from pathlib import Path
from typing import Any, Protocol

import xxhash

from stepladder.core.errors import InputError, as_input_error
from stepladder.data.local_files import make_change_error, validate_readable

OPEN_FILES = 128  # at once; a process may have a thousand
PIECE_BYTES = 16 << 20
SAMPLED_BYTES = 1 << 16  # of a piece by which a file is known again
MAX_SAMPLED_PIECES = 16  # of a file: a megabyte, and all of a smaller file
ALL_SAMPLED_PIECES = 128  # of all files, but at least two of each
# What lies in the place of a large file in a repository that was cloned without such files.
POINTERS = (b"version https://git-lfs.", b"/annex/objects/")
MAX_POINTER_BYTES = 1024
MAX_HASHES = 256  # of a data set, in the state of a Loader
MIN_COPY_BYTES = 4096
READ_TWICE = "its samples would be read twice"
ONCE_HINT = "one of them; Mixture([data], passes=[2]) reads data twice on purpose"
DATA_HINT = "a file, a folder, or a pattern such as 'data/*.parquet'"

Contents = list[list[str]]  # the name and the hash of each file


class DataFile(Protocol):
    """A file whose bytes are read by position."""

    # Its path or URL, as messages name it.
    name: str
    # The number of its bytes.
    size: int
    # A text that is another one when the contents have changed.
    identity: str

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end), all of which the file must have."""
        ...

    def read_parts(self, begins: list[int], ends: list[int]) -> list[bytes]:
        """Return the bytes of several parts, each as `read` does."""
        ...

    def get_path(self) -> Path:
        """Return where the file, or a copy of it, lies on this machine, for a library."""
        ...


class LocalFile:
    """A file on a disk of this machine, or on a file system that it has mounted."""

    def __init__(self, path: Path) -> None:
        validate_readable(path)
        status = path.stat()
        self.name = str(path)
        self.size = status.st_size
        # When the file was written last, in nanoseconds since 1970.
        self.modified_ns = status.st_mtime_ns
        self.identity = f"{path.resolve()} {status.st_size} {self.modified_ns}"
        if self.size < MAX_POINTER_BYTES and self.read(0, self.size).startswith(POINTERS):
            raise InputError(
                f"{path} only tells Git LFS or git-annex where the data are",
                "git lfs pull, or git annex get .",
            )

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end).

        Raises:
            InputError: The file has become shorter since it was opened, or cannot be read.
        """
        # Not mapped: a file that somebody truncates would end the process with SIGBUS.
        with as_input_error(f"cannot read {self.name}", DATA_HINT):
            descriptor = self._open().fileno()
            data = os.pread(descriptor, end - begin, begin)
            while len(data) < end - begin:  # of more than two gigabytes, as Linux reads them
                position = begin + len(data)
                part = os.pread(descriptor, end - position, position)
                if not part:
                    raise InputError(f"{self.name} ends at byte {position:,}", "copy it again")
                data += part
        return data

    def read_parts(self, begins: list[int], ends: list[int]) -> list[bytes]:
        """Return the bytes of several parts: by one call if they follow each other.

        Raises:
            InputError: The file has become shorter since it was opened, or cannot be read.
        """
        if begins[1:] == ends[:-1]:
            first = begins[0]
            data = self.read(first, ends[-1])
            return [
                data[begin - first : end - first] for begin, end in zip(begins, ends, strict=True)
            ]
        with as_input_error(f"cannot read {self.name}", DATA_HINT):
            file = self._open()
            sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
            parts = list(map(os.pread, repeat(file.fileno()), sizes, begins))
        if list(map(len, parts)) != sizes:
            return [self.read(begin, end) for begin, end in zip(begins, ends, strict=True)]
        return parts

    def get_path(self) -> Path:
        """Return where the file lies.

        Raises:
            InputError: It is gone, or has changed since it was opened.
        """
        with as_input_error(f"cannot read {self.name}", DATA_HINT):
            path = Path(self.name).resolve(strict=True)
            _validate_unchanged(self.name, path.stat(), self.size, self.modified_ns)
        return path

    def _open(self) -> io.FileIO:
        return open_file(self.name, self.size, self.modified_ns)


@lru_cache(maxsize=OPEN_FILES)
def open_file(name: str, size: int, modified_ns: int) -> io.FileIO:
    """Return the open file; it is closed when many others were opened since, and nobody reads.

    Args:
        name: Its path.
        size: Its bytes when it was opened as data.
        modified_ns: When it had been written last by then.

    Raises:
        InputError: It has changed since.
    """
    file = io.FileIO(name)
    _validate_unchanged(name, os.fstat(file.fileno()), size, modified_ns)
    return file


def _validate_unchanged(name: str, status: os.stat_result, size: int, modified_ns: int) -> None:
    """Raise InputError if a file is not the one of this size and time."""
    if (status.st_size, status.st_mtime_ns) != (size, modified_ns):
        raise make_change_error(name)


class FileView(io.RawIOBase):
    """A DataFile as a Python file, for libraries that take one."""

    def __init__(self, file: DataFile) -> None:
        super().__init__()
        self.file = file
        self.position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position, and return it."""
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.file.size}
        self.position = max(0, origins[whence] + offset)
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, and return how many there were."""
        target = memoryview(buffer).cast("B")
        begin = min(self.position, self.file.size)
        self.position = min(begin + len(target), self.file.size)
        target[: self.position - begin] = self.file.read(begin, self.position)
        return self.position - begin


def read_pieces(file: DataFile) -> Iterator[bytes]:
    """Yield all bytes of a file, in pieces that fit into memory."""
    for begin in range(0, file.size, PIECE_BYTES):
        yield file.read(begin, min(begin + PIECE_BYTES, file.size))


def hash_files(files: Sequence[DataFile]) -> Contents:
    """Return what a training is bound to: hashes of the sizes and of samples of files.

    Args:
        files: The files. Of many, several neighbours have one hash.

    Returns:
        The name of each file, or of the first of several neighbours, and the hash.
    """
    pieces = min(MAX_SAMPLED_PIECES, max(2, ALL_SAMPLED_PIECES // max(1, len(files))))
    step = -(-len(files) // MAX_HASHES) or 1
    contents = []
    for begin in range(0, len(files), step):
        hashed = xxhash.xxh64()
        for file in files[begin : begin + step]:
            hashed.update(str(file.size).encode())
            last = max(0, file.size - SAMPLED_BYTES)
            begins = sorted({last * number // (pieces - 1) for number in range(pieces)})
            ends = [min(first + SAMPLED_BYTES, file.size) for first in begins]
            for part in file.read_parts(begins, ends):
                hashed.update(part)
        contents.append(
            [os.fsencode(files[begin].name).decode(errors="replace"), hashed.hexdigest()]
        )
    return contents


def validate_no_copies(files: Sequence[DataFile]) -> None:
    """Validate that no file is a copy of another: its samples would be read twice.

    Args:
        files: Those that have samples. Small ones may be equal by chance.

    Raises:
        InputError: One is.
    """
    sizes = Counter(file.size for file in files)
    known: dict[tuple[int, str], DataFile] = {}
    for file in files:
        if file.size < MIN_COPY_BYTES or sizes[file.size] == 1:
            continue
        last = max(0, file.size - SAMPLED_BYTES)
        ends = file.read(0, min(SAMPLED_BYTES, file.size)) + file.read(last, file.size)
        other = known.setdefault((file.size, xxhash.xxh64_hexdigest(ends)), file)
        if other is not file and all(map(eq, read_pieces(other), read_pieces(file))):
            raise InputError(f"{file.name} is a copy of {other.name}: {READ_TWICE}", ONCE_HINT)


def is_url(path: str | Path) -> bool:
    """Return whether a path is that of another machine."""
    return "://" in str(path)


def shorten(identity: str) -> str:
    """Return a name for files that belong to an identity."""
    return hashlib.blake2b(os.fsencode(identity), digest_size=16).hexdigest()
