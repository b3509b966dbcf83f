"""One shard: written aside, fsynced, renamed; the disk's errors become one line, never a crash of
HDF5.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stepladder.core import durable
from stepladder.data.disk import Feedback, sha256_of
from stepladder.data.table import Block, Column, Ragged, Table, length

GOES_ON = "make room, then type the command again: it goes on after the last whole shard"
VALUES_PER_CHUNK = 1 << 14  # of the values of lists


@dataclass(frozen=True)
class ShardSettings:
    """All that decides the bytes of the shards. source: the table's identity.  columns: as the
    index has them.
    """

    source: dict[str, Any]
    columns: dict[str, dict[str, Any]]
    chunk_rows: int
    rows_per_shard: int
    compress: bool


def write_shard(
    path: Path, table: Table, settings: ShardSettings, chunks: Iterable[Block], feedback: Feedback
) -> dict[str, Any]:
    """A shard from chunks of chunk_rows rows each: its entry in the index."""
    with durable.name_write_errors(path, GOES_ON), durable.replace_file(path) as aside:
        entry = fill(aside, table, settings, chunks, feedback)
        entry["sha256"] = sha256_of(aside)
    return {"file": path.name, "bytes": path.stat().st_size, **entry}


def fill(
    path: Path, table: Table, settings: ShardSettings, chunks: Iterable[Block], feedback: Feedback
) -> dict[str, Any]:
    """Write chunks into a new HDF5 file: rows, bytes of the longest lists of a chunk, checksums."""
    import h5py

    sums: dict[str, list[int]] = {name: [] for name in table.columns}
    rows = list_bytes = 0
    with File(path) as file:
        with h5py.File(file, "w") as h5:
            arrays = {
                name: Array(h5, name, column, settings) for name, column in table.columns.items()
            }
            for block in chunks:
                for name, array in arrays.items():
                    sums[name].append(array.append(block[name]))
                file.refuse_failed()
                rows += length(block)
                lists = (column for column in block.values() if isinstance(column, Ragged))
                list_bytes = max(list_bytes, sum(column.values.nbytes for column in lists))
                feedback.progress(table.name, table.done, table.total)
        file.refuse_failed()
    checksums = {name: np.array(values, ">u8").tobytes().hex() for name, values in sums.items()}
    return {"rows": rows, "list_bytes": list_bytes, "checksums": checksums}


class Array:
    """A column of a shard under way."""

    def __init__(self, h5: Any, name: str, column: Column, settings: ShardSettings) -> None:
        how: dict[str, Any] = (
            {"compression": "gzip", "compression_opts": 1} if settings.compress else {}
        )
        self.column, self.rows, self.values = column, 0, 0
        rows = settings.chunk_rows
        if column.is_list:
            group = h5.create_group(name)
            self.target = group.create_dataset(
                "ends", (0,), np.int64, chunks=(rows,), maxshape=(None,), **how
            )
            shape = {"shape": (0,), "maxshape": (None,), "chunks": (VALUES_PER_CHUNK,)}
            self.flat = group.create_dataset("values", dtype=column.dtype, **shape, **how)
        else:
            self.target = h5.create_dataset(
                name,
                (0, *column.shape),
                column.dtype,
                maxshape=(None, *column.shape),
                chunks=(rows, *column.shape),
                **how,
            )

    def append(self, part: Any) -> int:
        """Write the rows of one chunk behind the others. Their checksum, as the reader computes it."""
        if not self.column.is_list:
            array = np.ascontiguousarray(part, self.column.dtype)
            self.rows = put(self.target, self.rows, array)
            return xxhash.xxh3_64_intdigest(array.data)
        values = np.ascontiguousarray(part.values, self.column.dtype)
        offsets = np.ascontiguousarray(part.offsets, np.int64)
        self.rows = put(self.target, self.rows, offsets[1:] + self.values)
        self.values = put(self.flat, self.values, values)
        return xxhash.xxh3_64_intdigest(values.data, seed=xxhash.xxh3_64_intdigest(offsets.data))


def put(target: Any, start: int, array: np.ndarray) -> int:
    target.resize(start + len(array), 0)
    target[start:] = array
    return start + len(array)


class File(io.FileIO):
    """The file below HDF5. It keeps the disk's errors to itself until asked.

    HDF5 crashes the process (segmentation fault, 1.14) when it closes a file that it could not
    write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        try:
            while rest and self.failure is None:  # a disk that fills up takes the first bytes only
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.failure = error
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return size or 0

    def refuse_failed(self) -> None:
        if self.failure is not None:
            raise self.failure
