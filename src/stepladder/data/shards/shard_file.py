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

from stepladder.core import durable
from stepladder.data.local_files import compute_sha256
from stepladder.data.shards.index import StoredShard
from stepladder.data.shards.shard import compute_checksum, import_h5py
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
) -> StoredShard:
    """Write a shard.

    Args:
        path: The file.
        table: The table of the rows.
        settings: The settings of the data set.
        chunks: Blocks of chunk_rows rows; the last one may be shorter.

    Returns:
        The shard's entry in the index.
    """
    with durable.name_write_errors(path, CONTINUE_HINT), durable.replace_file(path) as temporary:
        rows, list_bytes, checksums = _write_h5(temporary, table, settings, chunks)
        size = temporary.stat().st_size
        sha256 = compute_sha256(temporary)
    return StoredShard(path.name, rows, size, sha256, checksums, list_bytes)


def _write_h5(
    path: Path, table: Table, settings: ShardSettings, chunks: Iterable[Block]
) -> tuple[int, int, dict[str, str]]:
    """Write chunks into a new HDF5 file; return its rows, list bytes and checksums."""
    rows = 0
    list_bytes = 0
    checksums: dict[str, list[int]] = {name: [] for name in table.columns}
    with _DiskFile(path) as file:
        with import_h5py().File(file, "w") as h5:
            datasets = {
                name: _create_datasets(h5, name, column, settings)
                for name, column in table.columns.items()
            }
            for block in chunks:
                for name, column in table.columns.items():
                    part = _convert(block[name], column)
                    _append_rows(datasets[name], part)
                    checksums[name].append(compute_checksum(part))
                file.raise_failure()
                rows += count_rows(block)
                list_bytes = max(list_bytes, _count_list_bytes(block))
        file.raise_failure()
    texts = {}
    for name, values in checksums.items():
        texts[name] = np.array(values, ">u8").tobytes().hex()
    return rows, list_bytes, texts


def _count_list_bytes(block: Block) -> int:
    return sum(column.values.nbytes for column in block.values() if isinstance(column, Ragged))


def _create_datasets(h5: Any, name: str, column: Column, settings: ShardSettings) -> list[Any]:
    """Create the HDF5 dataset of a column; of one of lists those of their ends and their values.

    Returns:
        The datasets. They stay open while rows are appended: a chunk that is not full would be
        compressed each time that its dataset is closed.
    """

    def create(group: Any, name: str, rows: Column, chunk_rows: int) -> Any:
        options: dict[str, Any] = {}
        if settings.compress:
            options = {"compression": "gzip", "compression_opts": 1}
        return group.create_dataset(
            name,
            (0, *rows.shape),
            rows.dtype,
            maxshape=(None, *rows.shape),
            chunks=(chunk_rows, *rows.shape),
            **options,
        )

    if not column.is_list:
        return [create(h5, name, column, settings.chunk_rows)]
    group = h5.create_group(name)
    ends = create(group, "ends", Column(np.dtype(np.int64)), settings.chunk_rows)
    return [ends, create(group, "values", Column(column.dtype), VALUES_PER_CHUNK)]


def _convert(rows: Any, column: Column) -> Any:
    """Return the rows of a block in the types of the shard."""
    if not isinstance(rows, Ragged):
        return np.ascontiguousarray(rows, column.dtype)
    values = np.ascontiguousarray(rows.values, column.dtype)
    return Ragged(values, np.ascontiguousarray(rows.offsets, np.int64))


def _append_rows(datasets: list[Any], rows: Any) -> None:
    """Append the rows of a chunk to the datasets of their column."""
    parts = [rows]
    if isinstance(rows, Ragged):
        parts = [rows.offsets[1:] + len(datasets[1]), rows.values]
    for dataset, part in zip(datasets, parts, strict=True):
        begin = len(dataset)
        dataset.resize(begin + len(part), 0)
        dataset[begin:] = part


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
