"""Shards: data sets as chunked HDF5 files in a folder, with an index or without, opened and
checked.

A column is a dataset whose first dimension is the rows. A column of lists is a group with `values`,
all lists in a row, and `ends`, where each of them ends."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core import typed_file
from stepladder.core.errors import InputError, as_input_error, to_one_line
from stepladder.core.order import Chunks
from stepladder.data.table import Column, chosen, row_bytes, unusable

INDEX = "index.json"
UNFINISHED = "index.json.part"
MOST_CHUNK_BYTES = (1 << 32) - 1  # of HDF5
MOST_INDEX_BYTES = 1 << 30  # of some hundred terabytes in shards
SUFFIXES = (".h5", ".hdf5")
CHUNK_BYTES = 400_000  # advised: large enough for one read to be cheap, small enough to hold dozens
POOL_BYTES = 48 << 20  # of chunks that a process holds
H5_ERRORS = (
    OSError,
    KeyError,
    RuntimeError,
    ValueError,
    TypeError,
)  # what h5py raises on a damaged file


@dataclass(frozen=True)
class Shard:
    """One file. bytes, sha256 and checksums (of each chunk, per column) are None where there is no
    index.
    """

    path: Path
    rows: int
    chunk_rows: int
    bytes: int | None = None
    sha256: str | None = None
    checksums: dict[str, np.ndarray] | None = None

    @property
    def num_chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)


class Shards:
    """A data set in `path`: a folder of shards, or one HDF5 file. Give it as a job's train_data or
    eval_data.

    columns: which to read; a batch is then a list of tensors in that order, else a dict by name.
    Opens no file for longer than this call. InputError names a shard that is missing, is of another
    size than the index says, or has columns of different lengths.
    """

    def __init__(self, path: str | Path, columns: tuple[str, ...] | None = None) -> None:
        self.path = Path(path)
        self.as_list = columns is not None
        if (self.path / UNFINISHED).is_file() and not (self.path / INDEX).is_file():
            raise InputError(
                f"{self.path} is not finished: its writing was stopped",
                "type that stepladder data shard again",
            )
        if (self.path / INDEX).is_file():
            every, self.shards, self.list_bytes = read_index(self.path)
        else:
            every, self.shards, self.list_bytes = look(self.path, columns)
        self.columns = {name: every[name] for name in chosen(columns or (), every, self.path)}

    def __len__(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """Of one row in the chosen columns; of lists only what their lengths take."""
        return row_bytes(self.columns)

    @property
    def chunk_bytes(self) -> int:
        """Of the largest chunk, uncompressed."""
        return max(shard.chunk_rows for shard in self.shards) * self.row_bytes + self.list_bytes

    @cached_property
    def chunks(self) -> Chunks:
        """What a plan needs to know of them."""
        rows = tuple((shard.rows, shard.chunk_rows) for shard in self.shards)
        return Chunks(rows, max(4, POOL_BYTES // max(1, self.chunk_bytes)))


def is_shards(path: Path) -> bool:
    """Whether the folder, or the file, looks like shards."""
    if path.is_dir():
        return (path / INDEX).is_file() or bool(h5_files(path))
    return path.suffix in SUFFIXES


def h5_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)


def bad_shards(folder: Path, found: str) -> InputError:
    return InputError(
        found,
        f"write the shards again: stepladder data shard INPUT --out {shlex.quote(str(folder))}",
    )


def advised_chunk_rows(row_bytes: float) -> int:
    """A power of two whose chunks have about CHUNK_BYTES."""
    return 1 << max(0, round(math.log2(CHUNK_BYTES / max(1, row_bytes))))


# -- with an index ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredColumn:
    """A column as the index has it."""

    dtype: str
    shape: tuple[int, ...]
    is_list: bool

    def as_column(self) -> Column:
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biuf" or min(self.shape, default=1) < 1:
            raise ValueError(f"a column of {self.dtype} {list(self.shape)}")
        return Column(dtype, self.shape, self.is_list)


@dataclass(frozen=True)
class StoredShard:
    """A shard as the index has it. checksums: of each chunk, 16 hexadecimal digits each, per
    column.
    """

    file: str
    rows: int
    bytes: int
    sha256: str
    checksums: dict[str, str]

    def as_shard(self, folder: Path, chunk_rows: int) -> Shard:
        sums = {
            name: np.frombuffer(bytes.fromhex(text), ">u8") for name, text in self.checksums.items()
        }
        if Path(self.file).name != self.file:
            raise ValueError(f"a shard in {self.file!r}")
        return Shard(folder / self.file, self.rows, chunk_rows, self.bytes, self.sha256, sums)


@dataclass(frozen=True)
class StoredIndex:
    """index.json, but for what the shards were made from."""

    rows: int
    list_bytes: int
    columns: dict[str, StoredColumn]
    chunk_rows: int
    shards: tuple[StoredShard, ...]


def read_index(folder: Path) -> tuple[dict[str, Column], list[Shard], int]:
    """Columns, shards, and bytes of the longest lists in a chunk; the files are there and of the
    right size.
    """
    try:
        index = typed_file.parse_json(
            typed_file.read_file(folder / INDEX, MOST_INDEX_BYTES), StoredIndex
        )
        columns = {name: column.as_column() for name, column in index.columns.items()}
        shards = [one.as_shard(folder, index.chunk_rows) for one in index.shards]
        if (
            min(
                index.rows,
                index.chunk_rows,
                index.list_bytes + 1,
                *(shard.rows for shard in shards),
            )
            < 1
        ):
            raise ValueError("a number of rows or bytes that is none")
        if index.chunk_rows * row_bytes(columns) > MOST_CHUNK_BYTES:
            raise ValueError(f"chunks of {index.chunk_rows:,} rows")
    except (OSError, ValueError, TypeError) as error:
        raise bad_shards(folder, f"cannot use {folder / INDEX} ({to_one_line(error)})") from error
    for shard in shards:
        refuse_other_file(shard, list(columns))
    if index.rows != (found := sum(shard.rows for shard in shards)):
        raise bad_shards(
            folder,
            f"{folder / INDEX} disagrees with itself: {index.rows} rows in all, {found} in its shards",
        )
    return columns, shards, index.list_bytes


def refuse_other_file(shard: Shard, columns: list[str]) -> None:
    """InputError where the file is not what the index says, as far as can be seen without reading
    it.
    """
    assert shard.checksums is not None, "the index has them"
    folder = shard.path.parent
    try:
        size = shard.path.stat().st_size
    except OSError:
        raise bad_shards(
            folder, f"{folder / INDEX} lists {shard.path.name}, which is missing"
        ) from None
    if size != shard.bytes:
        raise bad_shards(folder, f"{shard.path} has {size:,} bytes, {shard.bytes:,} in {INDEX}")
    if any(len(shard.checksums.get(name, ())) != shard.num_chunks for name in columns):
        raise bad_shards(
            folder,
            f"{folder / INDEX} disagrees with itself: {shard.path.name} has {shard.num_chunks} chunks and"
            " another number of checksums",
        )


# -- without one: what any script wrote with h5py --------------------------------------------------


def look(path: Path, names: tuple[str, ...] | None) -> tuple[dict[str, Column], list[Shard], int]:
    """The same of files that have no index, from the files themselves."""
    if not path.exists():
        raise InputError(f"there is no {path}", "stepladder data shard INPUT --out DIR")
    files = h5_files(path) if path.is_dir() else [path]
    if not files:
        raise bad_shards(path, f"{path} holds no shards ({' or '.join(SUFFIXES)})")
    columns: dict[str, Column] = {}
    shards = []
    for file in files:
        found, shard = look_into(file, names)
        columns = columns or found
        if found != columns:
            other = next(n for n in {**columns, **found} if columns.get(n) != found.get(n))
            raise InputError(
                f"column {other!r} is {found.get(other, 'missing')} in {file} and"
                f" {columns.get(other, 'missing')} in {files[0].name}",
                "keep data sets in folders of their own",
            )
        shards.append(shard)
    return columns, shards, 0


def look_into(file: Path, names: tuple[str, ...] | None) -> tuple[dict[str, Column], Shard]:
    import h5py

    with (
        as_input_error(f"cannot read {file} as HDF5", "write the file again", H5_ERRORS),
        h5py.File(file, "r", locking=False) as h5,
    ):
        arrays = {
            n: a for n, a in h5.items() if isinstance(a, h5py.Dataset) and (not names or n in names)
        }
        columns = {name: column_of(file, name, array) for name, array in arrays.items()}
        lengths = [f"{name} has {len(array)} rows" for name, array in arrays.items()]
        if len({len(array) for array in arrays.values()}) != 1:
            found = ", ".join(lengths) or "it has no arrays"
            raise unusable(file, found, "give every array one row per sample")
        largest = arrays[max(columns, key=lambda name: columns[name].row_bytes)]
        shard = Shard(file, len(largest), natural_chunk(largest, row_bytes(columns)))
    return columns, shard


def column_of(file: Path, name: str, array: Any) -> Column:
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise InputError(
            f"{file}: {name} is {'a single value' if array.ndim == 0 else f'of type {array.dtype}'}, not rows of"
            " numbers",
            f"leave it away (columns=...), or bring it into shards: stepladder data shard {file} --out DIR",
        )
    return Column(array.dtype.newbyteorder("="), array.shape[1:])


def natural_chunk(largest: Any, row_bytes: int) -> int:
    """Rows to read at once: a chunk of the largest column, unless that is far from what is advised.

    Compressed chunks are read as they are: a part of one costs as much as the whole.
    """
    advised = advised_chunk_rows(row_bytes)
    rows = largest.chunks[0] if largest.chunks else advised
    return rows if largest.compression or advised // 4 <= rows <= advised * 4 else advised
