"""Parquet files as a source: a row group is a chunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pyarrow.parquet as pq

from stepladder.core.errors import InputError, as_input_error
from stepladder.data.readers.damage import DAMAGE_HINT
from stepladder.data.readers.files import DataFile, FileView, LocalFile
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.tables import PARQUET_DAMAGE, TablePart, TableSource

OPEN_PARQUET_FILES = 32  # at once, each with its metadata


def open_parquet_files(files: list[DataFile], options: OpenOptions) -> TableSource:
    """Return the rows of Parquet files, which must have the same columns.

    Args:
        files: The files, whose rows follow each other.
        options: What the caller of `open_data` has set.

    Raises:
        InputError: A file is no Parquet file, or has other columns than the first.
    """

    @lru_cache(OPEN_PARQUET_FILES)
    def open_again(number: int) -> Any:
        return _open_parquet_file(files[number])

    schema = open_again(0).schema_arrow
    parts: list[TablePart] = []
    for number, file in enumerate(files):
        opened = open_again(number)
        if not opened.schema_arrow.equals(schema):
            problem = f"{file.name} has other columns than {files[0].name}"
            raise InputError(problem, "a pattern of files that belong together")
        parts += _list_row_groups(file.name, opened, partial(open_again, number))
    if not parts:
        raise InputError(f"{files[0].name} has no rows", "a file with rows")
    return TableSource("parquet", files, parts, schema, options)


def _open_parquet_file(file: DataFile) -> Any:
    """Read the metadata of a file, at its end."""
    with as_input_error(f"cannot use {file.name}", DAMAGE_HINT, PARQUET_DAMAGE):
        if isinstance(file, LocalFile):
            return pq.ParquetFile(file.get_path(), page_checksum_verification=True)
        return pq.ParquetFile(FileView(file), page_checksum_verification=True)


def _list_row_groups(name: str, opened: Any, open_again: Callable[[], Any]) -> list[TablePart]:
    """Return the row groups of a file that have rows."""
    parts = []
    first_row = 0
    for number in range(opened.num_row_groups):
        group = opened.metadata.row_group(number)
        if group.num_rows:
            read = partial(_read_row_group, open_again, number)
            part = TablePart(name, first_row, group.num_rows, group.total_byte_size, read)
            parts.append(part)
        first_row += group.num_rows
    return parts


def _read_row_group(open_again: Callable[[], Any], number: int, columns: list[str]) -> Any:
    """Return columns of a row group as a table."""
    return open_again().read_row_group(number, columns=columns)
