"""The inputs of `stepladder data shard` as tables. Each is read in blocks, so it may be large."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data import idx
from stepladder.data import table as tables
from stepladder.data.local_files import validate_readable
from stepladder.data.readers.companions import has_suffix
from stepladder.data.readers.file_rows import OpenedSource
from stepladder.data.readers.files import is_url
from stepladder.data.readers.listing import list_names
from stepladder.data.readers.open_data import (
    COMPRESSED,
    COMPRESSED_HINT,
    FORMAT_NAMES,
    MDS,
    find_format,
    open_named,
)
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.shards.array_files import idx_table, npz_table, read_idx_magic
from stepladder.data.shards.dataset import Shards, is_shards
from stepladder.data.shards.reader import ShardReader
from stepladder.data.table import Block, Column, Table, find_column, input_error, rows_per_block

INPUT_KINDS = (
    f"what open_data reads ({FORMAT_NAMES}), NumPy (.npz), IDX (MNIST files, or a folder of the"
    " four), HDF5 (.h5)"
)
NPZ_SUFFIX = ".npz"
TYPED_RECORDS = 4096  # by which the types of columns are chosen
RECORD_HINT = (
    "correct it, then type the command again; or --columns NAME,NAME without that column, or"
    " --dtype NAME=float64 for one of CSV"
)


def open_tables(
    path: str,
    names: tuple[str, ...] = (),
    dtypes: dict[str, str] | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Table]:
    """Return the tables of an input by the subfolder that their shards are written to.

    MNIST has two tables, "train" and "test"; every other input has one, "".

    Args:
        path: A file, a folder, a pattern or a URL.
        names: The columns to read, all by default.
        dtypes: Types of CSV columns, by name.
        settings: Other arguments of open_data.

    Raises:
        InputError: The input cannot be used; it names the file and the position in it.
    """
    local = Path(path)
    if settings:
        return {"": _open_source(path, names, dtypes or {}, settings)}
    if not is_url(path) and local.is_dir() and idx.has_mnist_files(local):
        files = idx.find_mnist_files(local)
        splits = {
            split: {name: files[f"{split}_{name}"] for name in ("images", "labels")}
            for split in ("train", "test")
        }
        return {split: idx_table(pair, names, local) for split, pair in splits.items()}
    return {"": _open_table(path, names, dtypes or {})}


def _open_table(path: str, names: tuple[str, ...], dtypes: dict[str, str]) -> Table:
    """Return the table of an input whose kind its name tells, or else its first bytes."""
    local = Path(path)
    if holds_shards(local):
        return _shards_table(local, names)
    if local.suffix == NPZ_SUFFIX:
        return npz_table(local, names)
    if find_format(list_names(path)) is not None:
        return _open_source(path, names, dtypes, {})
    magic = -1
    if not local.is_dir():
        validate_readable(local)
        magic = read_idx_magic(local)
    for name, expected in (("labels", idx.LABELS_MAGIC), ("images", idx.IMAGES_MAGIC)):
        if magic == expected:
            return idx_table({name: local}, names, local)
    raise make_kind_error(path, "is of no kind that can be sharded")


def make_kind_error(path: str, problem: str) -> InputError:
    """Return the error for an input of no kind that is known."""
    hint = COMPRESSED_HINT if has_suffix(path, COMPRESSED) else f"give {INPUT_KINDS}"
    return InputError(f"{path} {problem}", hint)


def holds_shards(path: Path) -> bool:
    """Return whether a path is a sharded data set; MDS has an index.json of the same name."""
    return is_shards(path) and find_format(list_names(str(path))) != MDS


def _parse_dtype(name: str, text: str) -> np.dtype[Any]:
    """Return the type of --dtype NAME=TEXT. Raises InputError if it is not a type of numbers."""
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses "f8,(2,)f8" as Python
        dtype = np.dtype(object)
    if dtype.kind not in "biuf" or dtype.itemsize > tables.MAX_NUMBER_BYTES:
        raise InputError(
            f"--dtype {name}={text} is not a type of numbers", f"--dtype {name}=float32"
        )
    return dtype


# -- what open_data opens --------------------------------------------------------------------------


def _open_source(
    path: str, names: tuple[str, ...], dtypes: dict[str, str], settings: dict[str, Any]
) -> Table:
    """Return what open_data opens with these arguments as a table."""
    types = {name: _parse_dtype(name, text) for name, text in dtypes.items()}
    others = {name: value for name, value in settings.items() if name != "format"}
    options = OpenOptions(
        names or None, dtypes=types, typed_records=TYPED_RECORDS, tables_in_memory=1, **others
    )
    table = _source_table(path, names, open_named([path], settings.get("format"), options))
    if settings:
        table.identity["settings"] = repr(settings)
    return table


def _source_table(path: str, names: tuple[str, ...], source: OpenedSource) -> Table:
    """Return a source of numbers as a table, whose first row has the types of the columns."""
    reader = _SourceReader(path, names, source)
    columns: dict[str, Column] = {}
    for name, values in reader.read_block(0, 1).items():
        column = _find_column(values)
        if column is None:
            problem = f"column {name} is {source.columns[name]}, not numbers or lists of them"
            raise input_error(path, problem, "--columns without it")
        columns[name] = column
    return Table(path, columns, _identify_source(source), reader, len(source))


@dataclass(frozen=True)
class _SourceReader:
    """Reads the rows of a source chunk by chunk.

    Args:
        path: What the user gave.
        names: The columns that the source was asked for; empty for all.
        source: The source.
    """

    path: str
    names: tuple[str, ...]
    source: OpenedSource

    def __call__(self, table: Table) -> Iterator[Block]:
        """Yield all rows; the function `read` of a Table."""
        rows = rows_per_block(table.columns)
        edges = self.source.chunk_edges
        for begin, end in pairwise([0, len(self.source)] if edges is None else map(int, edges)):
            for first in range(begin, end, rows):
                last = min(first + rows, end)
                block = self.read_block(first, last)
                for name, column in table.columns.items():
                    if (found := _find_column(block[name])) != column:
                        kind = found or type(block[name][0]).__name__
                        problem = f"column {name} is {column} in its first row, and {kind} in one"
                        place = f"of rows {first:,} to {last - 1:,}"
                        raise input_error(self.path, f"{problem} {place}", RECORD_HINT)
                yield block

    def read_block(self, first: int, last: int) -> Block:
        """Return the rows [first, last) by column: arrays, Ragged, or lists of no numbers."""
        try:
            batch = self.source.read(np.arange(first, last))
        except InputError as error:  # whose hint is for a caller of open_data
            problem = f"{error.problem} (rows {first:,} to {last - 1:,} of {self.path})"
            raise InputError(problem, RECORD_HINT) from error
        if not isinstance(batch, dict):
            batch = dict(zip(self.names, batch, strict=True))
        return {name: _to_numpy(values) for name, values in batch.items()}


def _to_numpy(values: Any) -> Any:
    """Return a tensor as an array where NumPy has its type; all else as it is."""
    try:
        return values.numpy()
    except (AttributeError, TypeError):
        return values


def _find_column(values: Any) -> Column | None:
    """Return the column that values of a batch belong to; None if they are no numbers."""
    column = find_column(values)
    return column if column is not None and column.dtype.kind in "biuf" else None


def _identify_source(source: OpenedSource) -> dict[str, Any]:
    """Return what another source has too if it has the same rows."""
    files = getattr(source, "files", None)
    if not isinstance(files, list):  # images, of which there may be a million
        return {"kind": source.format, "fingerprint": source.fingerprint}
    names = [
        [Path(file.name).name, file.size, getattr(file, "modified_ns", file.identity)]
        for file in files
    ]
    return {"kind": source.format, "files": names}


# -- shards ----------------------------------------------------------------------------------------


def _shards_table(path: Path, names: tuple[str, ...]) -> Table:
    """Return shards, or any HDF5 file with arrays of one length, as a table to be sharded again."""
    shards = Shards(path, names or None)
    files = tables.identify_files("hdf5", *shards.files)
    return Table(str(path), shards.columns, files, partial(_read_shards, shards), len(shards))


def _read_shards(shards: Shards, table: Table) -> Iterator[Block]:
    block_rows = max(shard.chunk_rows for shard in shards.shards)
    with ShardReader(shards) as reader:
        for first in range(0, len(shards), block_rows):
            yield reader.read(np.arange(first, min(first + block_rows, len(shards))))
