"""A cache on disk for the blocks of remote files, which all processes of a machine share."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import xxhash

from stepladder.core.durable import replace_file
from stepladder.core.errors import as_input_error
from stepladder.core.folders import get_cache_folder

BLOCK_BYTES = 1 << 20
MAPPED_BLOCKS = 128  # of a process, which lie in the kernel's memory, not in its own
CACHE_BYTES = 20 << 30
CHECKSUM_BYTES = 8
WHOLE_FILE = "0-whole"  # begins with a digit, as blocks do
WRITES_PER_SCAN = 32  # the cache may be larger than its limit by so many blocks for each process
KEPT_PART = 0.9  # of the limit, when blocks are removed
SPACE_HINT = "free some space, or export XDG_CACHE_HOME=DIR"

Fetch = Callable[[list[int]], list[bytes]]


class BlockCache:
    """Blocks of remote files on disk, the oldest of which are removed above a limit.

    A block ends with its checksum: one that a crash has left half written is fetched again.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        # Returns a block that is here; the last ones stay mapped.
        self._map_block = lru_cache(MAPPED_BLOCKS)(_map_block)
        self.writes = 0
        self.lock = threading.RLock()

    @property
    def folder(self) -> Path:
        """Where the blocks are, a folder for each file."""
        return get_cache_folder() / "blocks"

    def read_blocks(self, key: str, numbers: list[int], fetch: Fetch) -> list[memoryview]:
        """Return blocks of a file, and fetch those that are not here.

        Args:
            key: The name of the file in the cache.
            numbers: The blocks.
            fetch: Called with the blocks that are missing; it returns their bytes.
        """
        folder = self.folder / key
        paths = {number: folder / f"{number:08d}" for number in numbers}
        with self.lock:
            blocks = {number: self._find(path) for number, path in paths.items()}
            missing = [number for number, block in blocks.items() if block is None]
            if missing:
                with lock_places(folder, missing, f"the cache in {folder}"):
                    blocks |= self._fetch_missing(
                        {number: paths[number] for number in missing}, fetch
                    )
        return [block for block in blocks.values() if block is not None]

    def keep_whole(self, key: str, fetch_all: Callable[[], Iterator[bytes]]) -> Path:
        """Return the path of a copy of a whole file, which counts as a block.

        Args:
            key: The name of the file in the cache.
            fetch_all: Yields the bytes of the file.
        """
        folder = self.folder / key
        path = folder / WHOLE_FILE
        with self.lock, lock_places(folder, [0], f"the cache in {folder}"):
            if not path.exists():
                with self._replace(path) as temporary, temporary.open("wb") as out:
                    for data in fetch_all():
                        out.write(data)
                self._remove_oldest(kept=path)
            os.utime(path)
        return path

    def _fetch_missing(self, paths: dict[int, Path], fetch: Fetch) -> dict[int, memoryview | None]:
        """Return blocks that another process has written meanwhile, or that are fetched now."""
        blocks = {number: self._find(path) for number, path in paths.items()}
        absent = [number for number, block in blocks.items() if block is None]
        for number, data in zip(absent, fetch(absent) if absent else [], strict=True):
            self._write(paths[number], data)
            blocks[number] = self._find(paths[number]) or memoryview(data)
        return blocks

    def _find(self, path: Path) -> memoryview | None:
        """Return a block without its checksum, or None if it is not here or damaged."""
        with suppress(OSError, ValueError):
            return self._map_block(path)
        return None

    @contextmanager
    def _replace(self, path: Path) -> Iterator[Path]:
        """Yield a file that replaces one of the cache, whose loss in a power cut is no loss."""
        with (
            as_input_error(f"cannot write the cache in {path.parent}", SPACE_HINT),
            replace_file(path, fsync=False) as temporary,
        ):
            yield temporary

    def _write(self, path: Path, data: bytes) -> None:
        with self._replace(path) as temporary:
            temporary.write_bytes(data + xxhash.xxh64_digest(data))
        self.writes += 1
        if self.writes % WRITES_PER_SCAN == 1:
            self._remove_oldest()

    def _remove_oldest(self, kept: Path | None = None) -> None:
        """Remove the blocks that were read longest ago, if all are more than the limit.

        Args:
            kept: A file that stays, however large it is.
        """
        entries = []
        for path in self.folder.glob("*/[0-9]*"):  # also what a killed process left half written
            with suppress(OSError):  # another process has removed it
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        if total <= self.max_bytes:
            return
        for _, size, path in sorted(entries):
            if path == kept:
                continue
            with suppress(OSError):
                path.unlink()
            total -= size
            if total <= KEPT_PART * self.max_bytes:
                return


def _map_block(path: Path) -> memoryview:
    """Return a block without its checksum. Raises OSError or ValueError without a right one."""
    view = memoryview(map_file(path))
    os.utime(path)  # the least recently used blocks are removed first
    block = view[:-CHECKSUM_BYTES]
    if xxhash.xxh64_digest(block) != view[-CHECKSUM_BYTES:]:
        raise ValueError(f"{path} is damaged")
    return block


def map_file(path: Path) -> mmap.mmap:
    """Return a file in the kernel's memory. Raises OSError, or ValueError for an empty one."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@contextmanager
def lock_places(folder: Path, numbers: list[int], label: str) -> Iterator[None]:
    """Let no other process of this machine write what these numbers stand for during the block.

    Args:
        folder: The folder of a file whose bytes are locked.
        numbers: The bytes.
        label: What cannot be written if the folder cannot, for a message.

    The kernel drops the locks of a process that ends. A file system may have none: then two
    processes can write the same, and the second replaces it by the same bytes.
    """
    with as_input_error(f"cannot write {label}", SPACE_HINT):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+b")
    with file:
        with suppress(OSError):
            for number in sorted(numbers):
                fcntl.lockf(file, fcntl.LOCK_EX, 1, number)
        yield
