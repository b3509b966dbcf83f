"""HDF5 files without an index, as any script writes them with h5py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from os import fsdecode
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError, as_input_error
from stepladder.data.readers.companions import is_companion
from stepladder.data.readers.files import LocalFile
from stepladder.data.readers.listing import list_paths
from stepladder.data.shards.shard import (
    H5_ERRORS,
    H5_SUFFIXES,
    Shard,
    find_h5_files,
    open_h5,
    recommend_chunk_rows,
    shards_error,
)
from stepladder.data.table import Column, input_error, row_bytes

H5_MAGIC = b"\x89HDF\r\n\x1a\n"
# Where the superblock of a file has the address of its end, by the superblock's version.
SUPERBLOCK_BYTES = 64
END_PLACES = {0: 40, 1: 44}
LATER_END_PLACE = 28


def inspect_files(
    path: Path, names: tuple[str, ...] | None
) -> tuple[dict[str, Column], list[Shard]]:
    """Return the columns and the shards of a folder of HDF5 files, or of one file.

    Args:
        path: The folder or the file.
        names: The columns to read; None for all arrays.

    Returns:
        The columns by name, and a shard for each file.

    Raises:
        InputError: There are no files, or their columns differ.
    """  # noqa: DOC501 - shards_error makes an InputError
    if not path.exists():
        raise InputError(f"there is no {path}", "stepladder data shard INPUT --out DIR")
    files = find_h5_files(path) if path.is_dir() else [path]
    if not files:
        raise shards_error(path, f"{path} holds no shards ({' or '.join(H5_SUFFIXES)})")
    first_columns, first_shard = _inspect_file(files[0], names)
    shards = [first_shard]
    for file in files[1:]:
        columns, shard = _inspect_file(file, names)
        _validate_same_columns(first_columns, files[0], columns, file)
        shards.append(shard)
    return first_columns, shards


def validate_only_shards(folder: Path, files: list[Path]) -> None:
    """Raise InputError if another file, also of a folder below, may hold samples."""
    known = set(files)
    for name in list_paths(str(folder)):
        if Path(name) not in known and not is_companion(name):
            raise InputError(
                f"{name} is no file of the shards in {folder}",
                f"only {' or '.join(H5_SUFFIXES)} files of one data set in a folder",
            )


def _validate_same_columns(
    first_columns: dict[str, Column], first_file: Path, columns: dict[str, Column], file: Path
) -> None:
    for name in {**first_columns, **columns}:
        if columns.get(name) != first_columns.get(name):
            raise InputError(
                f"column {name!r} is {columns.get(name, 'missing')} in {file} and"
                f" {first_columns.get(name, 'missing')} in {first_file.name}",
                "keep data sets in folders of their own",
            )


def _inspect_file(file: Path, names: tuple[str, ...] | None) -> tuple[dict[str, Column], Shard]:
    modified_ns = file.stat().st_mtime_ns
    with (
        as_input_error(f"cannot read {file} as HDF5", "write the file again", H5_ERRORS),
        open_h5(file) as h5,
    ):
        _validate_single(file, h5.userblock_size)
        arrays = {name: array for name, array in h5.items() if not names or name in names}
        columns = {name: _find_column(file, name, array) for name, array in arrays.items()}
        paths = {path for array in arrays.values() for path in _find_linked(array)}
        linked = tuple(LocalFile(path) for path in sorted(paths - {file}))
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            texts = [f"{name} has {rows} rows" for name, rows in lengths.items()]
            problem = ", ".join(texts) or "it has no arrays"
            raise input_error(file, problem, "give every array one row per sample")
        largest = max(columns, key=lambda name: columns[name].row_bytes)
        chunk_rows = _choose_chunk_rows(arrays[largest], row_bytes(columns))
    return columns, Shard(
        file, lengths[largest], chunk_rows, modified_ns=modified_ns, linked=linked
    )


def _validate_single(file: Path, begin: int) -> None:
    """Raise InputError if another HDF5 file follows in a file, of which nothing would be read."""
    with file.open("rb") as stream:
        stream.seek(begin)
        head = stream.read(SUPERBLOCK_BYTES)
        place = END_PLACES.get(head[len(H5_MAGIC)], LATER_END_PLACE)
        stream.seek(begin + int.from_bytes(head[place : place + 8], "little"))
        if stream.read(len(H5_MAGIC)) == H5_MAGIC:
            raise input_error(file, "several files were joined into it", "these files in a folder")


def _find_column(file: Path, name: str, array: Any) -> Column:
    kind = ""
    if array is None:
        kind = "a link that leads nowhere"
    elif not hasattr(array, "ndim"):
        kind = f"a {type(array).__name__.lower()}"  # group, datatype
    elif array.ndim == 0:
        kind = "a single value"
    elif array.dtype.kind not in "biuf":
        kind = f"of type {array.dtype}"
    if kind:
        raise InputError(f"{file}: {name} is {kind}, not rows of numbers", "columns= without it")
    if not _is_written(array):
        problem = f"{file}: rows of {name} were never written, and would be read as zeros"
        raise InputError(problem, "write them, also if they are zeros; or columns= without it")
    return Column(array.dtype.newbyteorder("="), array.shape[1:])


def _is_written(array: Any) -> bool:
    """Tell whether all chunks of an array are there; HDF5 shows those that are not as zeros."""
    if array.is_virtual or array.external or not array.size:
        return True
    if not array.chunks:
        return bool(array.id.get_storage_size())
    counts = map(math.ceil, np.divide(array.shape, array.chunks))
    return bool(array.id.get_num_chunks() >= math.prod(counts))


def _find_linked(array: Any) -> Iterator[Path]:
    """Yield the files with values of an array: that of a link's end, raw ones, those it shows.

    Raises:
        OSError: An array that it shows is not there; HDF5 would show fill values.
    """
    file = Path(array.file.filename)
    yield file
    yield from (Path(fsdecode(name)) for name, _, _ in array.external or ())
    for source in array.virtual_sources() if array.is_virtual else ():
        path = file if source.file_name == "." else file.parent / source.file_name
        with open_h5(path) as h5:
            if source.dset_name not in h5:
                raise OSError(f"{path} has no {source.dset_name}")
            yield from _find_linked(h5[source.dset_name])


def _choose_chunk_rows(largest: Any, row_bytes: int) -> int:
    """Return the number of rows to read at once.

    They are those of a chunk of the largest array, unless that is far from the recommended size. A
    compressed chunk can only be read as a whole.
    """
    recommended = recommend_chunk_rows(row_bytes)
    if not largest.chunks:
        return recommended
    rows: int = largest.chunks[0]
    if largest.compression or recommended // 4 <= rows <= recommended * 4:
        return rows
    return recommended
