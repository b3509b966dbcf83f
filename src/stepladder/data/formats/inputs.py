"""What `stepladder data shard` reads: CSV, Parquet, NPZ, IDX, HDF5; each in blocks, never whole."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data import table as tables
from stepladder.data.disk import refuse_no_file
from stepladder.data.formats import idx
from stepladder.data.formats.csv import csv_table
from stepladder.data.shards.dataset import Shards, is_shards
from stepladder.data.shards.reader import Reader
from stepladder.data.table import Block, Column, Table, reading, unusable

DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
)  # of a password
MOST_ROW_BYTES = 1 << 30  # one is in memory, whole
KINDS = "CSV (.csv, .tsv), Parquet (.parquet), NumPy (.npz), IDX (MNIST files, or a folder of the four), HDF5 (.h5)"


def open_tables(
    path: Path, names: tuple[str, ...] = (), dtypes: dict[str, str] | None = None
) -> dict[str, Table]:
    """The tables of an input, by the subfolder that their shards go to: "", or train and test for
    MNIST.

    names: the columns to take, all by default.  dtypes: types of CSV columns, by name. InputError
    names what cannot be used: the file, and where in it."""
    if not path.exists():
        raise InputError(
            f"there is no {path}", f"stepladder data shard INPUT --out DIR; INPUT is {KINDS}"
        )
    if not path.is_dir():
        refuse_no_file(path)
    if path.is_dir() and idx.has_mnist(path):
        files = idx.mnist_paths(path)
        return {
            part: idx_table(
                {name: files[f"{part}_{name}"] for name in ("images", "labels")}, names, path
            )
            for part in ("train", "test")
        }
    return {"": open_table(path, names, dtypes or {})}


def open_table(path: Path, names: tuple[str, ...], dtypes: dict[str, str]) -> Table:
    """By what the path looks like, or else by the file's first bytes."""
    if is_shards(path):
        return shards_table(path, names)
    if path.suffix in (".csv", ".tsv"):
        return csv_table(path, names, dtypes)
    if path.suffix == ".parquet":
        try:
            from stepladder.data.formats.parquet import parquet_table  # late: pyarrow is an extra
        except ImportError as error:
            raise InputError(
                f"{path} needs pyarrow", "pip install 'stepladder[parquet]'"
            ) from error
        return parquet_table(path, names)
    if path.suffix == ".npz":
        return npz_table(path, names)
    kinds = {idx.LABELS: "labels", idx.IMAGES: "images"}
    if path.is_file() and (kind := kinds.get(idx_magic(path))):
        return idx_table({kind: path}, names, path)
    raise InputError(f"{path} is of no kind that can be sharded", f"give {KINDS}")


def shards_table(path: Path, names: tuple[str, ...]) -> Table:
    """Shards, to cut them anew, or any HDF5 file with arrays of one length."""
    shards = Shards(path, names or None)
    size = max(shard.chunk_rows for shard in shards.shards)

    def read(table: Table) -> Iterator[Block]:
        with Reader(shards) as reader:
            for lo in range(0, len(shards), size):
                rows = np.arange(lo, min(lo + size, len(shards)))
                table.done += len(rows) * shards.row_bytes
                yield reader.read(rows)

    files = tables.identity("hdf5", *(shard.path for shard in shards.shards))
    return Table(
        str(path), shards.columns, files, read, len(shards) * shards.row_bytes, rows=len(shards)
    )


# -- arrays that lie row after row in a stream: NPZ members, and IDX files, gzip'd or not ----------


class Member(NamedTuple):
    """An array of a file. label: what a message calls it.  open: its stream, whose rows begin at
    byte `start`.
    """

    label: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    open: Callable[[], IO[bytes]]


def stream_table(source: Path, files: dict[str, Any], members: dict[str, Member]) -> Table:
    """The members, a row per sample each, by column. files: the table's identity."""
    lengths = {member.label: member.shape[0] for member in members.values()}
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{label} has {rows} rows" for label, rows in lengths.items())
        hint = "--columns with those that belong together"
        raise unusable(source, f"its arrays differ in length: {found}", hint)
    columns = {name: Column(member.dtype, member.shape[1:]) for name, member in members.items()}
    if tables.row_bytes(columns) > MOST_ROW_BYTES:
        raise unusable(
            source, f"a row has {tables.row_bytes(columns):,} bytes, more than {MOST_ROW_BYTES:,}"
        )
    rows, size, unit = (
        min(lengths.values()),
        tables.rows_per_block(columns),
        tables.row_bytes(columns),
    )

    def read(table: Table) -> Iterator[Block]:
        with reading(source, DAMAGE), ExitStack() as opened:
            streams = {
                name: opened.enter_context(member.open()) for name, member in members.items()
            }
            for name, stream in streams.items():
                stream.read(members[name].start)
            for lo in range(0, rows, size):
                count = min(size, rows - lo)
                block = {
                    n: read_rows(s, columns[n], count, f"{n}, row {lo}") for n, s in streams.items()
                }
                table.done += count * unit
                yield block

    return Table(str(source), columns, files, read, rows * unit, rows=rows)


def read_rows(stream: IO[bytes], column: Column, rows: int, where: str) -> np.ndarray:
    data = stream.read(rows * column.row_bytes)
    if len(data) != rows * column.row_bytes:
        raise EOFError(f"the data of {where} and after ends early")
    return np.frombuffer(data, column.dtype).reshape(rows, *column.shape)


def npz_table(path: Path, names: tuple[str, ...]) -> Table:
    """The arrays `names` (all by default)."""
    with reading(path, (*DAMAGE, ValueError)):
        with zipfile.ZipFile(path) as archive:
            there = [
                name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")
            ]
        members = {
            name: npz_member(path, f"{name}.npy") for name in tables.chosen(names, there, path)
        }
    if not members:
        raise unusable(path, "it holds no arrays")
    return stream_table(path, tables.identity("npz", path), members)


def npz_member(path: Path, file: str) -> Member:
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(file)
    with open_npy(path, file) as stream:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read(stream)
        start = stream.tell()
        rest = info.file_size - start
    is_number = dtype.kind in "biuf" and dtype.itemsize <= 8
    if not shape or not is_number or (fortran and len(shape) > 1) or not dtype.isnative:
        kind = "Fortran order" if fortran else f"{dtype} of shape {list(shape)}"
        raise unusable(
            path,
            f"{file} is {kind}, not rows of numbers",
            "np.savez with C-ordered arrays of numbers",
        )
    if rest != math.prod(shape) * dtype.itemsize:
        raise unusable(path, f"{file} is of shape {list(shape)}, and has {rest:,} bytes of {dtype}")
    return Member(file.removesuffix(".npy"), shape, dtype, start, partial(open_npy, path, file))


def open_npy(path: Path, file: str) -> IO[bytes]:
    with zipfile.ZipFile(path) as archive:
        return archive.open(file)  # which can be read when the archive is closed


def idx_table(files: dict[str, Path], names: tuple[str, ...], source: Path) -> Table:
    """IDX files by column; those of `names` (all by default)."""
    members = {name: idx_member(files[name]) for name in tables.chosen(names, files, source)}
    return stream_table(source, tables.identity("idx", *files.values()), members)


def idx_member(path: Path) -> Member:
    with idx.reading(path), idx.open_plain(path) as stream:
        shape, start = idx.read_header(stream.read(idx.HEADER_BYTES), path)
    return Member(path.name, shape, np.dtype(np.uint8), start, partial(idx.open_plain, path))


def idx_magic(path: Path) -> int:
    try:
        with idx.open_plain(path) as stream:
            return int.from_bytes(stream.read(4), "big")
    except DAMAGE:
        return -1
