"""Arrow files, as Hugging Face's `save_to_disk` writes them: a record batch is a chunk."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pyarrow as pa

from stepladder.core.errors import InputError, get_reason
from stepladder.data.formats.parquet import PARQUET_DAMAGE
from stepladder.data.readers.damage import DAMAGE_HINT
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.open_options import OpenOptions, validate_local
from stepladder.data.readers.tables import TablePart, TableSource

ARROW_FILE_MAGIC = b"ARROW1"
OPEN_ARROW_FILES = 32  # at once


def open_arrow_files(files: list[DataFile], options: OpenOptions) -> TableSource:
    """Return the rows of Arrow files, streams as well as random access files.

    Args:
        files: The files, whose rows follow each other.
        options: What the caller of `open_data` has set.

    Raises:
        InputError: A file is damaged, or has other columns than the first.
    """
    open_again = lru_cache(OPEN_ARROW_FILES)(lambda number: map_arrow(files[number]))
    schema = open_again(0).schema
    parts: list[TablePart] = []
    for number, file in enumerate(files):
        table = open_again(number)
        if not table.schema.equals(schema):
            problem = f"{file.name} has other columns than {files[0].name}"
            raise InputError(problem, "files that belong together")
        first_row = 0
        for batch in table.to_batches():
            read = partial(
                slice_table,
                open_again,
                number,
                first_row,
                len(batch),
            )
            if len(batch):
                parts.append(
                    TablePart(
                        file.name,
                        first_row,
                        len(batch),
                        batch.nbytes,
                        read,
                    )
                )
            first_row += len(batch)
    if not parts:
        raise InputError(f"{files[0].name} has no rows", "a file with rows")
    return TableSource(
        "arrow",
        files,
        parts,
        schema,
        options,
    )


def map_arrow(file: DataFile) -> Any:
    """Return all rows of a file as a table, in the kernel's memory.

    Raises:
        InputError: The file is damaged, or is not on a disk.
    """
    path = validate_local(file, "Arrow")
    try:
        source = pa.memory_map(str(path))
        if file.read(0, min(len(ARROW_FILE_MAGIC), file.size)) == ARROW_FILE_MAGIC:
            return pa.ipc.open_file(source).read_all()
        return pa.ipc.open_stream(source).read_all()
    except PARQUET_DAMAGE as error:
        raise InputError(f"{file.name} cannot be used: {get_reason(error)}", DAMAGE_HINT) from error


def slice_table(
    open_again: Any,
    number: int,
    first_row: int,
    rows: int,
    columns: list[str],
) -> Any:
    """Return columns of some rows of a file."""
    return open_again(number).slice(first_row, rows).select(columns)
