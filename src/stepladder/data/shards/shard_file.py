"""Writing one shard.

The file is written under a temporary name, fsynced and renamed. An error of the disk becomes one
line, and no crash of HDF5.
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
from stepladder.data.local_files import compute_sha256
from stepladder.data.shards.shard import import_h5py
from stepladder.data.table import Block, Column, Ragged, Table, count_rows

CONTINUE_HINT = (
    "free some space, then type the command again: it continues after the last complete shard"
)
VALUES_PER_CHUNK = 1 << 14  # of the values of lists


@dataclass(frozen=True)
class ShardSettings:
    """Everything that decides the bytes of the shards.

    Args:
        source: The identity of the table.
        columns: The columns as the index has them.
        chunk_rows: The rows of a chunk.
        rows_per_shard: The rows of a file.
        compress: Whether chunks are compressed by gzip.
    """

    source: dict[str, Any]
    columns: dict[str, dict[str, Any]]
    chunk_rows: int
    rows_per_shard: int
    compress: bool


def write_shard(
    path: Path, table: Table, settings: ShardSettings, chunks: Iterable[Block]
) -> dict[str, Any]:
    """Write a shard.

    Args:
        path: The file.
        table: The table of the rows.
        settings: The settings of the data set.
        chunks: Blocks of chunk_rows rows; the last one may be shorter.

    Returns:
        The shard's entry in the index, and the bytes of the longest lists of a chunk.
    """
    with durable.name_write_errors(path, CONTINUE_HINT), durable.replace_file(path) as temporary:
        entry = _write_h5(temporary, table, settings, chunks)
        entry["sha256"] = compute_sha256(temporary)
    return {"file": path.name, "bytes": path.stat().st_size, **entry}


def _write_h5(
    path: Path, table: Table, settings: ShardSettings, chunks: Iterable[Block]
) -> dict[str, Any]:
    """Write chunks into a new HDF5 file; return its rows, list bytes and checksums."""
    rows = 0
    list_bytes = 0
    checksums: dict[str, list[int]] = {name: [] for name in table.columns}
    with _DiskFile(path) as file:
        with import_h5py().File(file, "w") as h5:
            writers: dict[str, _ArrayWriter | _ListWriter] = {}
            for name, column in table.columns.items():
                writer_class = _ListWriter if column.is_list else _ArrayWriter
                writers[name] = writer_class(h5, name, column, settings)
            for block in chunks:
                for name, writer in writers.items():
                    checksums[name].append(writer.append(block[name]))
                file.raise_failure()
                rows += count_rows(block)
                list_bytes = max(list_bytes, _count_list_bytes(block))
        file.raise_failure()
    texts = {}
    for name, values in checksums.items():
        texts[name] = np.array(values, ">u8").tobytes().hex()
    return {"rows": rows, "list_bytes": list_bytes, "checksums": texts}


def _count_list_bytes(block: Block) -> int:
    return sum(column.values.nbytes for column in block.values() if isinstance(column, Ragged))


class _GrowingDataset:
    """An HDF5 dataset that rows are appended to."""

    def __init__(
        self, group: Any, name: str, column: Column, chunk_rows: int, compress: bool
    ) -> None:
        options: dict[str, Any] = {}
        if compress:
            options = {"compression": "gzip", "compression_opts": 1}
        self.length = 0
        self.dataset = group.create_dataset(
            name,
            (0, *column.shape),
            column.dtype,
            maxshape=(None, *column.shape),
            chunks=(chunk_rows, *column.shape),
            **options,
        )

    def append(self, array: np.ndarray) -> None:
        end = self.length + len(array)
        self.dataset.resize(end, 0)
        self.dataset[self.length :] = array
        self.length = end


class _ArrayWriter:
    """Appends chunks of a column of arrays to a shard."""

    def __init__(self, h5: Any, name: str, column: Column, settings: ShardSettings) -> None:
        self.column = column
        self.rows = _GrowingDataset(h5, name, column, settings.chunk_rows, settings.compress)

    def append(self, part: Any) -> int:
        """Write the rows of a chunk, and return their checksum, as the reader computes it."""
        array = np.ascontiguousarray(part, self.column.dtype)
        self.rows.append(array)
        return xxhash.xxh3_64_intdigest(array.data)


class _ListWriter:
    """Appends chunks of a column of lists to a shard."""

    def __init__(self, h5: Any, name: str, column: Column, settings: ShardSettings) -> None:
        group = h5.create_group(name)
        ends = Column(np.dtype(np.int64))
        values = Column(column.dtype)
        self.column = column
        self.ends = _GrowingDataset(group, "ends", ends, settings.chunk_rows, settings.compress)
        self.values = _GrowingDataset(group, "values", values, VALUES_PER_CHUNK, settings.compress)

    def append(self, part: Ragged) -> int:
        """Write the lists of a chunk, and return their checksum, as the reader computes it."""
        values = np.ascontiguousarray(part.values, self.column.dtype)
        offsets = np.ascontiguousarray(part.offsets, np.int64)
        self.ends.append(offsets[1:] + self.values.length)
        self.values.append(values)
        offsets_digest = xxhash.xxh3_64_intdigest(offsets.data)
        return xxhash.xxh3_64_intdigest(values.data, seed=offsets_digest)


class _DiskFile(io.FileIO):
    """The file that HDF5 writes to. It stores an error of the disk instead of raising it.

    HDF5 1.14 crashes the process (segmentation fault) when it closes a file that it could not
    write.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        remaining = memoryview(data).cast("B")
        try:
            while remaining and self.failure is None:  # a full disk takes only the first bytes
                count = super().write(remaining)
                remaining = remaining[count:]
        except OSError as error:
            self.failure = error
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return size or 0

    def raise_failure(self) -> None:
        """Raise the error of the disk, if there was one."""
        if self.failure is not None:
            raise self.failure
