"""Arrow files, as Hugging Face's `save_to_disk` writes them: a record batch is a chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa

from stepladder.core.errors import InputError, get_reason
from stepladder.data.readers.arrow_stream import (
    ARROW_FILE_MAGIC,
    list_messages,
    list_remote_parts,
    read_schema,
)
from stepladder.data.readers.damage import DAMAGE_HINT
from stepladder.data.readers.files import DataFile, LocalFile
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.tables import PARQUET_DAMAGE, TablePart, TableSource

OPEN_ARROW_FILES = 32  # at once
STREAM_MARK = b"\xff" * 4  # which streams of Arrow before 0.15 lack


def open_arrow_files(files: list[DataFile], options: OpenOptions) -> TableSource:
    """Return the rows of Arrow files, streams as well as random access files.

    Args:
        files: The files, whose rows follow each other.
        options: What the caller of `open_data` has set.

    Raises:
        InputError: A file is damaged, or has other columns than the first.
    """
    open_again = lru_cache(OPEN_ARROW_FILES)(lambda number: _map_arrow(files[number]))
    schemas = []
    parts: list[TablePart] = []
    for number, file in enumerate(files):
        if isinstance(file, LocalFile):
            schemas.append(open_again(number).schema)
            parts += _list_local_parts(file, partial(open_again, number))
        else:
            schemas.append(read_schema(file))
            parts += list_remote_parts(file, schemas[-1])
        if not schemas[-1].equals(schemas[0]):
            problem = f"{file.name} has other columns than {files[0].name}"
            raise InputError(problem, "files that belong together")
    if not parts:
        raise InputError(f"{files[0].name} has no rows", "a file with rows")
    return TableSource("arrow", files, parts, schemas[0], options)


def _list_local_parts(file: DataFile, open_again: Callable[[], Any]) -> list[TablePart]:
    """Return the record batches of a file that have rows.

    Raises:
        InputError: A stream has no end, which pyarrow takes for one, or bytes after it.
    """
    if file.read(0, min(len(STREAM_MARK), file.size)) == STREAM_MARK:
        deque(list_messages(file), maxlen=0)
    parts = []
    first_row = 0
    for batch in open_again().to_batches():
        read = partial(_slice_table, open_again, first_row, len(batch))
        if len(batch):
            part = TablePart(file.name, first_row, len(batch), batch.nbytes, read)
            parts.append(part)
        first_row += len(batch)
    return parts


def _map_arrow(file: DataFile) -> Any:
    """Return all rows of a file as a table, in the kernel's memory.

    Raises:
        InputError: The file is damaged.
    """
    try:
        source = pa.memory_map(str(file.get_path()))
        head = file.read(0, min(len(ARROW_FILE_MAGIC), file.size))
        is_file = head == ARROW_FILE_MAGIC
        opened = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        table = opened.read_all()
        len(table.column_names)  # raises if one of them is no text
    except PARQUET_DAMAGE as error:
        raise InputError(f"{file.name} cannot be used: {get_reason(error)}", DAMAGE_HINT) from error
    return table


def _slice_table(
    open_again: Callable[[], Any], first_row: int, rows: int, columns: list[str]
) -> Any:
    """Return columns of some rows of a file."""
    return open_again().slice(first_row, rows).select(columns)
