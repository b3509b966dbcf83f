"""Arrays that are stored row after row as tables: members of NPZ files, and IDX files."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from stepladder.core.errors import as_input_error
from stepladder.data import idx
from stepladder.data import table as tables
from stepladder.data.readers.npy import NPY_HINT, read_npy_header
from stepladder.data.table import REPAIR_HINT, Block, Column, Table, input_error

# What reading a damaged file can raise. RuntimeError is zipfile's error for a password.
ARRAY_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
)
MAX_ROW_BYTES = 1 << 30  # a row is in memory


@dataclass(frozen=True)
class _StoredArray:
    """An array in a file.

    Args:
        label: Its name in messages.
        shape: Its shape; the first dimension is the rows.
        dtype: The type of its numbers.
        start: The offset in bytes of its first row in the stream.
        open: Returns the stream.
    """

    label: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    open: Callable[[], IO[bytes]]


def _read_arrays(source: Path, arrays: dict[str, _StoredArray], table: Table) -> Iterator[Block]:
    """Yield the rows of several arrays of one length; the function `read` of a Table."""
    block_rows = tables.rows_per_block(table.columns)
    with as_input_error(f"cannot use {source}", REPAIR_HINT, ARRAY_DAMAGE), ExitStack() as stack:
        streams = {name: stack.enter_context(array.open()) for name, array in arrays.items()}
        for name, array in arrays.items():
            streams[name].read(array.start)
        for first in range(0, table.rows, block_rows):
            count = min(block_rows, table.rows - first)
            block = {
                name: _read_rows(streams[name], column, count, f"{name}, row {first}")
                for name, column in table.columns.items()
            }
            yield block
        for name, stream in streams.items():
            if stream.read(1):
                raise EOFError(f"more follows after the last row of {name}")


def _array_table(source: Path, identity: dict[str, Any], arrays: dict[str, _StoredArray]) -> Table:
    """Return arrays as a table; a sample is one row of each array.

    Args:
        source: The file or folder, for messages.
        identity: The table's identity.
        arrays: The arrays by column name.

    Returns:
        The table, which reads the arrays only when its rows are read.

    Raises:
        InputError: The arrays differ in length, or a row is too large.
    """  # noqa: DOC501 - input_error makes an InputError
    lengths = {array.label: array.shape[0] for array in arrays.values()}
    if len(set(lengths.values())) != 1:
        text = ", ".join(f"{label} has {rows} rows" for label, rows in lengths.items())
        hint = "--columns with those that belong together"
        raise input_error(source, f"its arrays differ in length: {text}", hint)
    columns = {name: Column(array.dtype, array.shape[1:]) for name, array in arrays.items()}
    row_bytes = tables.row_bytes(columns)
    if row_bytes > MAX_ROW_BYTES:
        raise input_error(source, f"a row has {row_bytes:,} bytes, more than {MAX_ROW_BYTES:,}")
    rows = next(iter(lengths.values()))
    return Table(str(source), columns, identity, partial(_read_arrays, source, arrays), rows)


def _read_rows(stream: IO[bytes], column: Column, rows: int, position: str) -> np.ndarray:
    size = rows * column.row_bytes
    data = stream.read(size)
    if len(data) != size:
        raise EOFError(f"the data of {position} and after ends early")
    return np.frombuffer(data, column.dtype).reshape(rows, *column.shape)


# -- NPZ -------------------------------------------------------------------------------------------


def npz_table(path: Path, names: tuple[str, ...]) -> Table:
    """Return the arrays of an NPZ file as a table.

    Args:
        path: The file.
        names: The arrays to read; all arrays if this is empty.

    Returns:
        A table with a column for each array.

    Raises:
        InputError: The file is damaged or holds no arrays, or an array does not exist or holds no
            numbers.
    """  # noqa: DOC501 - input_error makes an InputError
    with as_input_error(f"cannot use {path}", REPAIR_HINT, (*ARRAY_DAMAGE, ValueError)):
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            if min((each.header_offset for each in archive.infolist()), default=0):
                raise ValueError("another file lies before its arrays")
        known = [member.removesuffix(".npy") for member in members]
        selected = tables.select_columns(names, known, path)
        arrays = {name: _find_npy(path, members[known.index(name)]) for name in selected}
    if not arrays:
        raise input_error(path, "it holds no arrays")
    return _array_table(path, tables.identify_files("npz", path), arrays)


def _find_npy(path: Path, member: str) -> _StoredArray:
    """Read the header of an array of an NPZ file. Raises InputError if it has no numbers."""
    if not member.endswith(".npy"):
        raise input_error(
            path, f"{member} is no array", "--columns with those that belong together"
        )
    with zipfile.ZipFile(path) as archive:
        member_bytes = archive.getinfo(member).file_size
    with _open_npy(path, member) as stream:
        header = read_npy_header(stream)
        start = stream.tell()
    shape, _, dtype = header
    if header.problem:
        raise input_error(path, f"{member} {header.problem}", NPY_HINT)
    data_bytes = member_bytes - start
    if data_bytes != math.prod(shape) * dtype.itemsize:
        problem = f"{member} is of shape {list(shape)}, and has {data_bytes:,} bytes of {dtype}"
        raise input_error(path, problem)
    label = member.removesuffix(".npy")
    return _StoredArray(label, shape, dtype, start, partial(_open_npy, path, member))


def _open_npy(path: Path, member: str) -> IO[bytes]:
    with zipfile.ZipFile(path) as archive:
        return archive.open(member)  # can be read after the archive is closed


# -- IDX -------------------------------------------------------------------------------------------


def idx_table(files: dict[str, Path], names: tuple[str, ...], source: Path) -> Table:
    """Return IDX files as a table.

    Args:
        files: A file for each column.
        names: The columns to read, all by default.
        source: What the user gave: the file, or the folder of the files.
    """
    selected = tables.select_columns(names, files, source)
    arrays = {name: _find_idx(files[name]) for name in selected}
    return _array_table(source, tables.identify_files("idx", *files.values()), arrays)


def _find_idx(path: Path) -> _StoredArray:
    with idx.report_errors(path), idx.open_decompressed(path) as stream:
        shape, start = idx.read_header(stream.read(idx.HEADER_BYTES), path)
    opener = partial(idx.open_decompressed, path)
    return _StoredArray(path.name, shape, np.dtype(np.uint8), start, opener)


def read_idx_magic(path: Path) -> int:
    """Return the magic number of a file; -1 if it cannot be read."""
    try:
        with idx.open_decompressed(path) as stream:
            return int.from_bytes(stream.read(4), "big")
    except ARRAY_DAMAGE:
        return -1
