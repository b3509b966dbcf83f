"""What `stepladder data shard` reads: CSV, Parquet, NPZ, IDX, HDF5; each in blocks, never whole."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data.formats import idx
from stepladder.data.formats.csv import csv_table
from stepladder.data.formats.parquet import parquet_table
from stepladder.data.formats.table import Block, Table, identity, row_bytes, rows_per_block, unusable
from stepladder.data.shards.dataset import Column, Shards, is_shards, one_line
from stepladder.data.shards.reader import Reader

KINDS = (
    "CSV (.csv, .tsv), Parquet (.parquet), NumPy (.npz), IDX (MNIST files, or a folder of the four), HDF5 (.h5)"
)


def open_tables(path: Path, names: tuple[str, ...] = (), dtypes: dict[str, str] | None = None) -> dict[str, Table]:
    """The tables of an input, by the subfolder that their shards go to: "", or train and test for MNIST.

    names: the columns to take, all by default.  dtypes: types of CSV columns, by name. InputError names
    what cannot be used: the file, and where in it.
    """
    if not path.exists():
        raise InputError(f"there is no {path}", f"stepladder data shard INPUT --out DIR; INPUT is {KINDS}")
    if path.is_dir() and idx.has_mnist(path):
        files = idx.mnist_paths(path)
        return {
            part: chosen(idx_table({n: files[f"{part}_{n}"] for n in ("images", "labels")}, path), names)
            for part in ("train", "test")
        }
    if is_shards(path):
        return {"": h5_table(path, names)}
    if path.suffix in (".csv", ".tsv"):
        return {"": csv_table(path, names, dtypes or {})}
    readers = {".parquet": parquet_table, ".npz": npz_table}
    if path.suffix in readers:
        return {"": chosen(readers[path.suffix](path), names)}
    if path.is_file() and idx_magic(path) in (idx.LABELS, idx.IMAGES):
        return {
            "": chosen(idx_table({"labels" if idx_magic(path) == idx.LABELS else "images": path}, path), names)
        }
    raise InputError(f"{path} is of no kind that can be sharded", f"give {KINDS}")


def chosen(table: Table, names: tuple[str, ...]) -> Table:
    """The table with these columns only, in this order."""
    for name in names:
        if name not in table.columns:
            raise InputError(
                f"{table.name} has no column {name!r}", f"columns there are: {', '.join(table.columns)}"
            )
    if not names:
        return table
    read = table.blocks

    def blocks(skip: int) -> Iterator[Block]:
        for block in read(skip):
            yield {name: block[name] for name in names}

    table.columns = {name: table.columns[name] for name in names}
    table.blocks = blocks
    return table


# -- NPZ and IDX: arrays that lie row after row in a stream ------------------------------------------------------


def npz_table(path: Path) -> Table:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.endswith(".npy")]
            heads = {name.removesuffix(".npy"): npy_head(archive, name, path) for name in members}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise unusable(path, one_line(error)) from error
    if not heads:
        raise unusable(path, "it holds no arrays")
    lengths = {name: shape[0] for name, (shape, _) in heads.items()}
    if len(set(lengths.values())) != 1:
        raise unusable(
            path,
            "its arrays differ in length: " + ", ".join(f"{n} has {count} rows" for n, count in lengths.items()),
            "--columns with those that belong together",
        )
    columns = {name: Column(dtype, shape[1:]) for name, (shape, dtype) in heads.items()}
    rows = next(iter(lengths.values()))
    table = Table(str(path), columns, lambda skip: iter(()), identity("npz", path), rows, unit=row_bytes(columns))

    def opened() -> dict[str, IO[bytes]]:
        archive = zipfile.ZipFile(path)
        streams = {name: archive.open(f"{name}.npy") for name in table.columns}
        for stream in streams.values():
            read_npy_head(stream)
        return streams

    table.blocks = partial(stream_blocks, table, path, opened)
    return table


def npy_head(archive: zipfile.ZipFile, name: str, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with archive.open(name) as stream:
        shape, fortran, dtype = read_npy_head(stream)
    if not shape or dtype.kind not in "biuf" or (fortran and len(shape) > 1) or not dtype.isnative:
        kind = "Fortran order" if fortran else f"{dtype} of shape {list(shape)}"
        raise unusable(path, f"{name} is {kind}, not rows of numbers", "np.savez with C-ordered arrays of numbers")
    return shape, dtype


def read_npy_head(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


def idx_magic(path: Path) -> int:
    try:
        with open_plain(path) as stream:
            return int.from_bytes(stream.read(4), "big")
    except (OSError, EOFError, zlib.error):
        return -1


def open_plain(path: Path) -> IO[bytes]:
    """The uncompressed bytes of a file, gzip'd or not."""
    with path.open("rb") as stream:
        packed = stream.read(2) == idx.GZIP_MAGIC
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def idx_table(files: dict[str, Path], source: Path) -> Table:
    """IDX files with a row per sample each, as columns of these names."""
    heads = {name: idx_head(path) for name, path in files.items()}
    lengths = {name: shape[0] for name, (shape, _) in heads.items()}
    if len(set(lengths.values())) != 1:
        raise unusable(source, ", ".join(f"{files[n].name} has {count} rows" for n, count in lengths.items()))
    columns = {name: Column(np.dtype(np.uint8), shape[1:]) for name, (shape, _) in heads.items()}
    rows = next(iter(lengths.values()))
    table = Table(
        str(source),
        columns,
        lambda skip: iter(()),
        identity("idx", *files.values()),
        rows,
        unit=row_bytes(columns),
    )

    def opened() -> dict[str, IO[bytes]]:
        streams = {name: open_plain(files[name]) for name in table.columns}
        for name, stream in streams.items():
            stream.read(heads[name][1])
        return streams

    table.blocks = partial(stream_blocks, table, source, opened)
    return table


def idx_head(path: Path) -> tuple[tuple[int, ...], int]:
    try:
        with open_plain(path) as stream:
            return idx.read_header(stream.read(64), path)
    except (OSError, EOFError, zlib.error) as error:
        raise unusable(path, one_line(error)) from error


def stream_blocks(table: Table, path: Path, opened: Any, skip: int) -> Iterator[Block]:
    """Blocks of a table whose columns are streams of rows; `opened` opens them at their first row."""
    streams: dict[str, IO[bytes]] = {}
    try:
        streams = opened()
        for name, stream in streams.items():
            pass_over(stream, skip * table.columns[name].row_bytes)
        size = rows_per_block(table.columns)
        for lo in range(skip, table.total, size):
            count = min(size, table.total - lo)
            block = {n: read_rows(s, table.columns[n], count, f"{n}, row {lo}") for n, s in streams.items()}
            table.done = lo + count
            yield block
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise unusable(path, one_line(error)) from error
    finally:
        for stream in streams.values():
            stream.close()


def pass_over(stream: IO[bytes], count: int) -> None:
    while count and (read := len(stream.read(min(count, 1 << 20)))):
        count -= read


def read_rows(stream: IO[bytes], column: Column, rows: int, where: str) -> np.ndarray:
    data = stream.read(rows * column.row_bytes)
    if len(data) != rows * column.row_bytes:
        raise EOFError(f"the data of {where} and after ends early")
    return np.frombuffer(data, column.dtype).reshape(rows, *column.shape)


def h5_table(path: Path, names: tuple[str, ...]) -> Table:
    """Shards, to cut them anew, or any HDF5 file with arrays of one length."""
    shards = Shards(path, names or None)
    files = [shard.path for shard in shards.shards]
    table = Table(
        str(path),
        shards.columns,
        lambda skip: iter(()),
        identity("hdf5", *files),
        len(shards),
        unit=shards.row_bytes,
    )

    def blocks(skip: int) -> Iterator[Block]:
        size = max(shard.chunk_rows for shard in shards.shards)
        with Reader(shards) as reader:
            for lo in range(skip, len(shards), size):
                hi = min(lo + size, len(shards))
                table.done = hi
                yield reader.read(np.arange(lo, hi))

    table.blocks = blocks
    return table
