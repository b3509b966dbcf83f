"""Sharded data sets: chunked HDF5 files in a folder, with an index or without.

A column is an HDF5 dataset whose first dimension is the rows. A column of lists is an HDF5 group
with `values`, all lists one after the other, and `ends`, where each of them ends.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from stepladder.core.arguments import validate_arguments
from stepladder.core.errors import InputError
from stepladder.core.order import Chunks
from stepladder.data.readers.files import Contents, LocalFile, hash_files
from stepladder.data.readers.listing import validate_distinct
from stepladder.data.shards.index import read_index
from stepladder.data.shards.shard import (
    H5_SUFFIXES,
    SHARD_INDEX,
    SHARD_JOURNAL,
    Shard,
    find_h5_files,
)
from stepladder.data.shards.unindexed import inspect_files, validate_only_shards
from stepladder.data.table import Column, row_bytes, select_columns

POOL_BYTES = 48 << 20  # of chunks in the memory of a process
MIN_SLOTS = 4


class Shards:
    """A data set to be streamed; give it as a job's train_data or eval_data.

    A batch is a dict of tensors by column. With `columns` it is a list of tensors in their order.
    """

    @validate_arguments
    def __init__(
        self, path: str | Path, columns: tuple[str, ...] | list[str] | None = None
    ) -> None:
        """Check that the data set can be read; no file stays open.

        Args:
            path: A folder of shards, or one HDF5 file.
            columns: The columns to read, all by default.

        Raises:
            InputError: A shard is missing, is of another size than the index says, or has columns
                of different lengths.
        """
        self.path = Path(path)
        self.as_list = columns is not None
        names = None if columns is None else tuple(columns)
        all_columns: dict[str, Column]
        self.shards: list[Shard]
        self.list_bytes = 0
        if (self.path / SHARD_INDEX).is_file():
            all_columns, self.shards, self.list_bytes = read_index(self.path)
        elif (self.path / SHARD_JOURNAL).is_file():
            raise InputError(
                f"{self.path} is not finished: its writing was stopped",
                "type that stepladder data shard again",
            )
        else:
            all_columns, self.shards = inspect_files(self.path, names)
        files = [shard.path for shard in self.shards]
        if self.path.is_dir():
            validate_only_shards(self.path, files)
        validate_distinct(list(map(str, files)))
        selected = select_columns(names or (), all_columns, self.path)
        self.columns = {name: all_columns[name] for name in selected}

    def __len__(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in the selected columns; of lists only those of their lengths."""
        return row_bytes(self.columns)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of the largest chunk, uncompressed."""
        return max(shard.chunk_rows for shard in self.shards) * self.row_bytes + self.list_bytes

    @property
    def files(self) -> list[Path]:
        """All files with values of the data set."""
        linked = [Path(file.name) for shard in self.shards for file in shard.linked]
        return list(dict.fromkeys([*(shard.path for shard in self.shards), *linked]))

    @cached_property
    def contents(self) -> Contents:
        """The name of each file, and a hash of its contents or of samples of them."""
        if any(shard.sha256 is None for shard in self.shards):
            return hash_files([LocalFile(path) for path in self.files])
        return [[str(shard.path), str(shard.sha256)] for shard in self.shards]

    @cached_property
    def chunks(self) -> Chunks:
        """The sizes of all chunks, which decide the order of the samples."""
        rows = tuple((shard.rows, shard.chunk_rows) for shard in self.shards)
        return Chunks(rows, max(MIN_SLOTS, POOL_BYTES // max(1, self.chunk_bytes)))


def is_shards(path: Path) -> bool:
    """Return whether a folder or a file looks like shards."""
    if path.is_dir():
        return (path / SHARD_INDEX).is_file() or bool(find_h5_files(path))
    return path.suffix in H5_SUFFIXES
