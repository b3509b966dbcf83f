"""Arrow files, as Hugging Face's `save_to_disk` writes them: a record batch is a chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa

from stepladder.core.errors import as_input_error
from stepladder.data.readers.arrow_stream import (
    ARROW_FILE_MAGIC,
    FILE_PREFIX_BYTES,
    list_messages,
    list_remote_batches,
)
from stepladder.data.readers.damage import DAMAGE_HINT
from stepladder.data.readers.files import DataFile, LocalFile
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.tables import PARQUET_DAMAGE, Groups, TableSource

OPEN_ARROW_FILES = 32  # at once
STREAM_MARK = b"\xff" * 4  # which streams of Arrow before 0.15 lack


def open_arrow_files(files: list[DataFile], options: OpenOptions) -> TableSource:
    """Return the rows of Arrow files, streams as well as random access files."""
    map_again = lru_cache(OPEN_ARROW_FILES)(lambda number: _map_arrow(files[number]))

    def open_again(number: int) -> Any:
        # The kernel ends a process that reads what is no longer there of a mapped file.
        files[number].get_path()
        return map_again(number)

    def list_groups(number: int) -> tuple[Any, Groups]:
        file = files[number]
        if isinstance(file, LocalFile):
            return open_again(number).schema, _list_local_batches(file, partial(open_again, number))
        return list_remote_batches(file)

    return TableSource("arrow", files, list_groups, options)


def _list_local_batches(file: DataFile, open_again: Callable[[], Any]) -> Groups:
    """Yield the record batches of a file.

    Raises:
        InputError: Its messages have no end, which pyarrow takes for one, or bytes after it.
    """
    head = file.read(0, min(FILE_PREFIX_BYTES + len(STREAM_MARK), file.size))
    begin = FILE_PREFIX_BYTES if head.startswith(ARROW_FILE_MAGIC) else 0
    if head.startswith(STREAM_MARK, begin):
        deque(list_messages(file), maxlen=0)
    first_row = 0
    for batch in open_again().to_batches():
        yield len(batch), batch.nbytes, partial(_slice_table, open_again, first_row, len(batch))
        first_row += len(batch)


def _map_arrow(file: DataFile) -> Any:
    """Return all rows of a file as a table, in the kernel's memory."""
    with as_input_error(f"{file.name} cannot be used", DAMAGE_HINT, PARQUET_DAMAGE):
        source = pa.memory_map(str(file.get_path()))
        head = file.read(0, min(len(ARROW_FILE_MAGIC), file.size))
        is_file = head == ARROW_FILE_MAGIC
        opened = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        table = opened.read_all()
        len(table.column_names)  # raises if one of them is no text
    return table


def _slice_table(
    open_again: Callable[[], Any], first_row: int, rows: int, columns: list[str]
) -> Any:
    """Return columns of some rows of a file."""
    return open_again().slice(first_row, rows).select(columns)
