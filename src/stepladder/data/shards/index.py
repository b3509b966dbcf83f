"""The index of a sharded data set: its columns, its shards, and their checksums."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepladder.core import typed_file
from stepladder.core.errors import to_one_line
from stepladder.data.shards.shard import SHARD_INDEX, Shard, shards_error
from stepladder.data.table import Column, row_bytes

MAX_CHUNK_BYTES = (1 << 32) - 1  # of HDF5
MAX_INDEX_BYTES = 1 << 30  # for shards of some hundred terabytes


@dataclass(frozen=True)
class _StoredColumn:
    """A column in the index."""

    dtype: str
    shape: tuple[int, ...]
    is_list: bool

    def to_column(self) -> Column:
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biuf" or min(self.shape, default=1) < 1:
            raise ValueError(f"a column of {self.dtype} {list(self.shape)}")
        return Column(dtype, self.shape, self.is_list)


@dataclass(frozen=True)
class StoredShard:
    """A shard in the index, and in the journal while others are written.

    Args:
        file: The name of its file.
        rows: The number of its rows.
        bytes: Its size.
        sha256: Its SHA-256 in hexadecimal digits.
        checksums: The checksums of each column as one text, 16 hexadecimal digits each.
        list_bytes: The bytes of the longest lists of a chunk.
    """

    file: str
    rows: int
    bytes: int
    sha256: str
    checksums: dict[str, str]
    list_bytes: int = 0

    def to_shard(self, folder: Path, chunk_rows: int) -> Shard:
        if Path(self.file).name != self.file:
            raise ValueError(f"a shard in {self.file!r}")
        checksums = {
            name: np.frombuffer(bytes.fromhex(text), ">u8") for name, text in self.checksums.items()
        }
        return Shard(folder / self.file, self.rows, chunk_rows, self.bytes, self.sha256, checksums)


@dataclass(frozen=True)
class _StoredIndex:
    """The fields of the index that readers need. It also says what the shards were made from.

    Args:
        rows: The number of all rows.
        list_bytes: The bytes of the longest lists of a chunk.
        columns: The columns by name.
        chunk_rows: The number of rows of a chunk.
        shards: The shards in the order of their rows.
    """

    rows: int
    list_bytes: int
    columns: dict[str, _StoredColumn]
    chunk_rows: int
    shards: tuple[StoredShard, ...]


def read_index(folder: Path) -> tuple[dict[str, Column], list[Shard], int]:
    """Read and check the index of a folder.

    Returns:
        The columns, the shards, and the bytes of the longest lists of a chunk.

    Raises:
        InputError: The index is damaged, or a shard is missing or of another size.
    """  # noqa: DOC501 - shards_error makes an InputError
    try:
        index = typed_file.parse_json(
            typed_file.read_file(folder / SHARD_INDEX, MAX_INDEX_BYTES), _StoredIndex
        )
        columns = {name: column.to_column() for name, column in index.columns.items()}
        shards = [shard.to_shard(folder, index.chunk_rows) for shard in index.shards]
        _validate_sizes(index, columns)
    except (OSError, ValueError, TypeError) as error:
        raise shards_error(
            folder, f"cannot use {folder / SHARD_INDEX} ({to_one_line(error)})"
        ) from error
    for shard in shards:
        _validate_shard(shard, columns)
    total_rows = sum(shard.rows for shard in shards)
    if index.rows != total_rows:
        raise shards_error(
            folder,
            f"{folder / SHARD_INDEX} disagrees with itself: {index.rows} rows in all, {total_rows}"
            " in its shards",
        )
    return columns, shards, index.list_bytes


def _validate_sizes(index: _StoredIndex, columns: dict[str, Column]) -> None:
    """Raise ValueError for a size that no writer of shards has written."""
    rows = [shard.rows for shard in index.shards]
    if min(index.rows, index.chunk_rows, *rows) < 1 or index.list_bytes < 0:
        raise ValueError("a number of rows or bytes that is not positive")
    if index.chunk_rows * row_bytes(columns) > MAX_CHUNK_BYTES:
        raise ValueError(f"chunks of {index.chunk_rows:,} rows")


def _validate_shard(shard: Shard, columns: dict[str, Column]) -> None:
    """Raise InputError if the file is not as the index says, as far as its size tells."""
    assert shard.checksums is not None, "the index has them"
    folder = shard.path.parent
    index = folder / SHARD_INDEX
    try:
        size = shard.path.stat().st_size
    except (OSError, ValueError):  # a name with a zero in it
        raise shards_error(folder, f"{index} lists {shard.path.name}, which is missing") from None
    if size != shard.bytes:
        raise shards_error(
            folder, f"{shard.path} has {size:,} bytes, {shard.bytes:,} in {SHARD_INDEX}"
        )
    for name in columns:
        if len(shard.checksums.get(name, ())) != shard.num_chunks:
            raise shards_error(
                folder,
                f"{index} disagrees with itself: {shard.path.name} has {shard.num_chunks} chunks"
                " and another number of checksums",
            )
