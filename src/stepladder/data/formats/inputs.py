"""What `stepladder data shard` reads: CSV, Parquet, NPZ, IDX, HDF5; each in blocks, never whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data.formats import idx
from stepladder.data.formats.csv import csv_table
from stepladder.data.formats.streams import idx_magic, idx_table, npz_table
from stepladder.data.shards.dataset import Shards, is_shards
from stepladder.data.shards.reader import Reader
from stepladder.data.table import Block, Table, identity

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
            part: idx_table({name: files[f"{part}_{name}"] for name in ("images", "labels")}, names, path)
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
            raise InputError(f"{path} needs pyarrow", "pip install 'stepladder[parquet]'") from error
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

    files = identity("hdf5", *(shard.path for shard in shards.shards))
    return Table(str(path), shards.columns, files, read, len(shards) * shards.row_bytes)
