"""Parquet files as a source: a row group is a chunk."""

from __future__ import annotations

from functools import lru_cache, partial
from operator import add
from typing import Any

import pyarrow.parquet as pq

from stepladder.core.errors import InputError, as_input_error
from stepladder.data.readers.damage import DAMAGE_HINT
from stepladder.data.readers.files import DataFile, FileView, LocalFile
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.tables import PARQUET_DAMAGE, Groups, TableSource

JOINT = b"PAR1PAR1"  # the end of a file, and the begin of another one
OPEN_PARQUET_FILES = 32  # at once, each with its metadata


def open_parquet_files(files: list[DataFile], options: OpenOptions) -> TableSource:
    """Return the rows of Parquet files, which must have the same columns."""
    open_again = lru_cache(OPEN_PARQUET_FILES)(lambda number: _open_parquet_file(files[number]))

    def read_group(number: int, group: int, columns: list[str]) -> Any:
        return open_again(number).read_row_group(group, columns=columns)

    def list_groups(number: int) -> tuple[Any, Groups]:
        opened = open_again(number)
        row_groups = map(opened.metadata.row_group, range(opened.num_row_groups))
        return opened.schema_arrow, [
            (row_group.num_rows, row_group.total_byte_size, partial(read_group, number, group))
            for group, row_group in enumerate(row_groups)
        ]

    return TableSource("parquet", files, list_groups, options)


def _open_parquet_file(file: DataFile) -> Any:
    """Read the metadata of a file, at its end."""
    with as_input_error(f"cannot use {file.name}", DAMAGE_HINT, PARQUET_DAMAGE):
        source = file.get_path() if isinstance(file, LocalFile) else FileView(file)
        opened = pq.ParquetFile(source, page_checksum_verification=True)
        _validate_single(file, opened.metadata)
        return opened


def _validate_single(file: DataFile, metadata: Any) -> None:
    """Validate that a file is one: only indexes lie between its columns and its metadata.

    Raises:
        InputError: It was joined of several, of which one would be read.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = (
        [groups[-1].column(number) for number in range(metadata.num_columns)] if groups else []
    )
    starts = [each.dictionary_page_offset or each.data_page_offset for each in columns]
    sizes = [each.total_compressed_size for each in columns]
    end = max(map(add, starts, sizes), default=0)
    if JOINT in file.read(end, file.size - metadata.serialized_size):
        raise InputError(
            f"{file.name} was joined of several files, of which one would be read",
            "these files, each by itself; pyarrow.concat_tables joins what is in them",
        )
