"""One file of a sharded data set, and what all modules of this package know of such files."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stepladder.core.errors import InputError
from stepladder.core.extras import import_extra
from stepladder.data.local_files import make_change_error
from stepladder.data.readers.files import LocalFile
from stepladder.data.table import Ragged

SHARD_INDEX = "index.json"
SHARD_JOURNAL = "index.json.part"  # the shards that are complete, while others are written
H5_SUFFIXES = (".h5", ".hdf5")
# Large enough for one read to be cheap, small enough to keep dozens in memory.
RECOMMENDED_CHUNK_BYTES = 400_000
# What h5py raises on a damaged file.
H5_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError)


def open_h5(path: Path) -> Any:
    """Open an HDF5 file for reading, which several processes may do at once."""
    return import_h5py().File(path, "r", locking=False)


def import_h5py() -> Any:
    return import_extra("h5py", "HDF5 files need h5py", "hdf5")


@dataclass(frozen=True)
class Shard:
    """One file of a data set. Without an index it has a time in place of the three before it.

    Args:
        path: The file.
        rows: The number of its rows.
        chunk_rows: The number of rows that are read at once.
        bytes: Its size.
        sha256: Its SHA-256 in hexadecimal digits.
        checksums: The checksum of each chunk, by column.
        modified_ns: When it was written last, in nanoseconds since 1970.
        linked: Other files with some of its values, which links and virtual arrays name.
    """

    path: Path
    rows: int
    chunk_rows: int
    bytes: int | None = None
    sha256: str | None = None
    checksums: dict[str, np.ndarray] | None = None
    modified_ns: int | None = None
    linked: tuple[LocalFile, ...] = ()

    @property
    def num_chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    def find(self) -> Path:
        """Return the path. Raises InputError if a file has changed, and no checksum can tell."""
        for file in self.linked:
            file.get_path()
        has_time = self.modified_ns is not None
        if has_time and self.path.stat().st_mtime_ns != self.modified_ns:
            raise make_change_error(self.path)
        return self.path

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Return the first row of a chunk, and the row after its last."""
        lo = chunk * self.chunk_rows
        return lo, min(lo + self.chunk_rows, self.rows)


def find_h5_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in H5_SUFFIXES)


def recommend_chunk_rows(row_bytes: float) -> int:
    """Return the power of two of rows that have about RECOMMENDED_CHUNK_BYTES."""
    return 1 << max(0, round(math.log2(RECOMMENDED_CHUNK_BYTES / max(1, row_bytes))))


def compute_checksum(rows: Any) -> int:
    """Return the checksum of the rows of one column in a chunk: an array, or Ragged from 0 on."""
    if isinstance(rows, Ragged):
        seed = xxhash.xxh3_64_intdigest(rows.offsets.data)
        return xxhash.xxh3_64_intdigest(rows.values.data, seed=seed)
    return xxhash.xxh3_64_intdigest(rows.data)


def shards_error(folder: Path, problem: str) -> InputError:
    """Make the error for shards that have to be written again."""
    return InputError(
        problem,
        f"write the shards again: stepladder data shard INPUT --out {shlex.quote(str(folder))}",
    )
