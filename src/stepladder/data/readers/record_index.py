"""Where the records of a file begin: found once, kept in a file, and mapped from there."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from stepladder.core.console import tell_if_slow
from stepladder.core.durable import replace_file
from stepladder.core.errors import as_input_error
from stepladder.core.folders import get_cache_folder
from stepladder.core.order import IndexArray
from stepladder.data.readers.block_cache import SPACE_HINT, lock_places, map_file
from stepladder.data.readers.companions import INDEX_SUFFIX
from stepladder.data.readers.files import DataFile, LocalFile, shorten

INDEX_HEADER = struct.Struct(
    "<16sQ8s"
)  # what it is, the size of the data file, a checksum of its ends
INDEX_MAGIC = b"stepladder-idx-2"
ENDS_BYTES = 4096  # of the first and last bytes of the data file, by which an index belongs to it

FindOffsets = Callable[[DataFile], Iterator[IndexArray]]


def load_index(
    file: DataFile, find_offsets: FindOffsets, kind: str, beside: bool = False
) -> IndexArray:
    """Return where the records of a file begin, and where the last one ends; shape (n + 1,).

    The index beside the file is taken, or that in the cache; without one it is made. Of several
    processes one makes it, and the others wait. An index beside a file that was written later is
    not taken: an edit may have kept the size. The name of one in the cache has that time in it.

    Args:
        file: The file.
        find_offsets: Yields the positions of a file, in parts.
        kind: How it finds them: another text, another index.
        beside: Whether a new index is written beside the file, not into the cache.
    """
    header = _make_header(file, kind)
    identity = f"{kind} {file.identity}"
    path = _find_index_path(identity)
    oldest_ns = 0
    if isinstance(file, LocalFile):
        neighbour = Path(file.name + INDEX_SUFFIX)
        if beside or _map_index(neighbour, header, file.modified_ns) is not None:
            path = neighbour
            oldest_ns = file.modified_ns
    message = f"{file.name} is read once, to find where its records begin"
    return _map_or_write(path, header, identity, partial(find_offsets, file), message, oldest_ns)


def make_index(
    identity: str, size: int, find_parts: Callable[[], Iterator[IndexArray]], message: str
) -> IndexArray:
    """Return the index of what an identity stands for, from the cache; without one it is made.

    Args:
        identity: A text that is another one when the index is.
        size: The number of samples that the index is about.
        find_parts: Yields the numbers of the index, in parts.
        message: What is printed if that takes long, in this process or in the one that makes it.
    """
    header = INDEX_HEADER.pack(INDEX_MAGIC, size, xxhash.xxh64_digest(identity.encode()))
    return _map_or_write(_find_index_path(identity), header, identity, find_parts, message)


def _find_index_path(identity: str) -> Path:
    """Return where the cache has the index of what an identity stands for."""
    return get_cache_folder() / "indexes" / shorten(identity)


def _map_or_write(
    path: Path,
    header: bytes,
    identity: str,
    find_parts: Callable[[], Iterator[IndexArray]],
    message: str,
    oldest_ns: int = 0,
) -> IndexArray:
    """Return the numbers of an index file, which one of several processes writes if need be."""
    found = _map_index(path, header, oldest_ns)
    if found is None:
        place = int(shorten(identity)[:7], 16)
        with (
            tell_if_slow(message),
            as_input_error(f"cannot write the index {path}", SPACE_HINT),
            lock_places(get_cache_folder() / "indexes", [place], f"the index {path}"),
        ):
            if _map_index(path, header, oldest_ns) is None:
                _write_index(path, header, find_parts())
        found = _map_index(path, header)
    assert found is not None, f"{path} was written, and is not there"
    return found


def _make_header(file: DataFile, kind: str) -> bytes:
    """Return the first bytes of the index of a kind of a file."""
    head = file.read(0, min(ENDS_BYTES, file.size))
    tail = file.read(max(0, file.size - ENDS_BYTES), file.size)
    return INDEX_HEADER.pack(
        INDEX_MAGIC, file.size, xxhash.xxh64_digest(kind.encode() + head + tail)
    )


def _map_index(path: Path, header: bytes, oldest_ns: int = 0) -> IndexArray | None:
    """Return the positions of an index file, in the kernel's memory; None if it is not that.

    Args:
        path: The index file.
        header: The bytes with which it begins.
        oldest_ns: When it must have been written, or later.
    """
    try:
        if path.stat().st_mtime_ns < oldest_ns:
            return None
        mapped = map_file(path)
    except (OSError, ValueError):
        return None
    if mapped[: len(header)] != header or (len(mapped) - len(header)) % 8:
        return None
    return np.frombuffer(mapped, np.int64, offset=len(header))


def _write_index(path: Path, header: bytes, parts: Iterator[IndexArray]) -> None:
    """Write an index file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as temporary, temporary.open("wb") as out:
        out.write(header)
        for part in parts:
            out.write(part.astype(np.int64).tobytes())
