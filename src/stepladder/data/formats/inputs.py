"""The inputs of `stepladder data shard` as tables. Each is read in blocks, so it may be large."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data import table as tables
from stepladder.data.formats import idx
from stepladder.data.formats.arrays import idx_table, npz_table, read_idx_magic
from stepladder.data.formats.csv import csv_table
from stepladder.data.local_files import validate_readable
from stepladder.data.shards.dataset import Shards, is_shards
from stepladder.data.shards.reader import ShardReader
from stepladder.data.table import Block, Table

INPUT_KINDS = (
    "CSV (.csv, .tsv), Parquet (.parquet), NumPy (.npz),"
    " IDX (MNIST files, or a folder of the four), HDF5 (.h5)"
)


def open_tables(
    path: Path, names: tuple[str, ...] = (), dtypes: dict[str, str] | None = None
) -> dict[str, Table]:
    """Return the tables of an input by the subfolder that their shards are written to.

    MNIST has two tables, "train" and "test"; every other input has one, "".

    Args:
        path: A file, or a folder of shards or of MNIST files.
        names: The columns to read, all by default.
        dtypes: Types of CSV columns, by name.

    Raises:
        InputError: The input cannot be used; it names the file and the position in it.
    """
    if not path.exists():
        raise InputError(
            f"there is no {path}", f"stepladder data shard INPUT --out DIR; INPUT is {INPUT_KINDS}"
        )
    if not path.is_dir():
        validate_readable(path)
    elif idx.has_mnist_files(path):
        files = idx.find_mnist_files(path)
        splits = {
            split: {name: files[f"{split}_{name}"] for name in ("images", "labels")}
            for split in ("train", "test")
        }
        return {split: idx_table(pair, names, path) for split, pair in splits.items()}
    return {"": open_table(path, names, dtypes or {})}


def open_table(path: Path, names: tuple[str, ...], dtypes: dict[str, str]) -> Table:
    """Return the table of an input whose kind its name tells, or else its first bytes."""
    if is_shards(path):
        return shards_table(path, names)
    if path.suffix in (".csv", ".tsv"):
        return csv_table(path, names, dtypes)
    if path.suffix == ".parquet":
        return open_parquet(path, names)
    if path.suffix == ".npz":
        return npz_table(path, names)
    magic = read_idx_magic(path) if path.is_file() else None
    if magic == idx.LABELS_MAGIC:
        return idx_table({"labels": path}, names, path)
    if magic == idx.IMAGES_MAGIC:
        return idx_table({"images": path}, names, path)
    raise InputError(f"{path} is of no kind that can be sharded", f"give {INPUT_KINDS}")


def open_parquet(path: Path, names: tuple[str, ...]) -> Table:
    try:
        from stepladder.data.formats.parquet import parquet_table  # pyarrow is an extra
    except ImportError as error:
        raise InputError(f"{path} needs pyarrow", "pip install 'stepladder[parquet]'") from error
    return parquet_table(path, names)


def shards_table(path: Path, names: tuple[str, ...]) -> Table:
    """Return shards, or any HDF5 file with arrays of one length, as a table to be sharded again."""
    shards = Shards(path, names or None)
    files = tables.identify_files("hdf5", *(shard.path for shard in shards.shards))
    total_bytes = len(shards) * shards.row_bytes
    read = partial(read_shards, shards)
    return Table(str(path), shards.columns, files, read, total_bytes, rows=len(shards))


def read_shards(shards: Shards, table: Table) -> Iterator[Block]:
    block_rows = max(shard.chunk_rows for shard in shards.shards)
    with ShardReader(shards) as reader:
        for first in range(0, len(shards), block_rows):
            rows = np.arange(first, min(first + block_rows, len(shards)))
            table.bytes_read += len(rows) * shards.row_bytes
            yield reader.read(rows)
