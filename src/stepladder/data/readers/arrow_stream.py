"""The record batches of an Arrow file that is read in parts, such as one behind a URL.

Both kinds of Arrow files hold messages, one after the other: four bytes of ones, the length of the
metadata, the metadata, and a body. The metadata is a FlatBuffer, which has the length of the body,
and of a record batch the number of its rows. pyarrow would read all bodies to tell it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.order import IndexArray
from stepladder.data.readers.damage import DAMAGE_HINT
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.record_index import load_index
from stepladder.data.readers.tables import PARQUET_DAMAGE, Groups

ARROW_FILE_MAGIC = b"ARROW1"
FILE_PREFIX_BYTES = 8  # the magic, and two bytes that fill it up
CONTINUATION = 0xFFFFFFFF
MESSAGE_PREFIX = struct.Struct("<II")
FILE_END = struct.Struct("<i6s")  # the size of the footer, and the magic
MAX_PADDING_BYTES = 64
SCHEMA = 1
RECORD_BATCH = 3
# The numbers of the fields of Message and of RecordBatch, in Arrow's Message.fbs.
MESSAGE_KIND = 1
MESSAGE_HEADER = 2
MESSAGE_BODY_LENGTH = 3
BATCH_LENGTH = 0


class _Message(NamedTuple):
    """A message of an Arrow file.

    Args:
        kind: SCHEMA, RECORD_BATCH or another number.
        rows: The rows of a record batch.
        begin: Where the message begins.
        end: Where its body ends.
    """

    kind: int
    rows: int
    begin: int
    end: int


def list_remote_batches(file: DataFile) -> tuple[Any, Groups]:
    """Return the columns and the record batches of a file; their index is kept in the cache.

    Raises:
        InputError: It is no Arrow file, it is damaged, or has columns with a dictionary.
    """
    message = next(list_messages(file), None)
    if message is None or message.kind != SCHEMA:
        raise InputError(f"{file.name} cannot be used: it has no schema", DAMAGE_HINT)
    data = file.read(message.begin, message.end)
    with as_input_error(f"{file.name} cannot be used", DAMAGE_HINT, PARQUET_DAMAGE):
        schema = pa.ipc.read_schema(pa.py_buffer(data))
    batches = load_index(file, _find_batches, "arrow messages").reshape(-1, 3).tolist()
    return schema, [
        (rows, end - begin, partial(_read_batch, file, begin, end, schema))
        for begin, end, rows in batches
    ]


def _find_batches(file: DataFile) -> Iterator[IndexArray]:
    """Yield where each record batch begins and ends, and the number of its rows.

    Raises:
        InputError: The file is damaged, or has columns with a dictionary.
    """
    for message in list_messages(file):
        if message.kind == RECORD_BATCH and message.rows:
            yield np.array([message.begin, message.end, message.rows], np.int64)
        elif message.kind not in (SCHEMA, RECORD_BATCH):
            raise InputError(
                f"{file.name} has columns with a dictionary, which are read from a disk alone",
                "copy it to a folder",
            )


def _read_batch(file: DataFile, begin: int, end: int, schema: Any, columns: list[str]) -> Any:
    """Return columns of a record batch as a table."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(file.read(begin, end)), schema)
    return pa.Table.from_batches([batch]).select(columns)


def list_messages(file: DataFile) -> Iterator[_Message]:
    """Yield the messages of a file, whose bodies are not read.

    Raises:
        InputError: The file is damaged.
    """
    is_file = file.read(0, min(len(ARROW_FILE_MAGIC), file.size)) == ARROW_FILE_MAGIC
    begin = FILE_PREFIX_BYTES if is_file else 0
    try:
        while message := _read_message(file, begin):
            yield message
            begin = message.end
    except (struct.error, IndexError) as error:
        problem = f"{file.name} cannot be used: its message at byte {begin:,} is damaged or missing"
        raise InputError(problem, DAMAGE_HINT) from error
    end = begin + MESSAGE_PREFIX.size
    if is_file:  # the end of one has a footer, which tells where messages are
        end += FILE_END.unpack(file.read(file.size - FILE_END.size, file.size))[0] + FILE_END.size
    if not 0 <= file.size - end <= is_file * MAX_PADDING_BYTES:
        problem = f"{file.name}: {file.size - end:,} bytes follow the end of its stream"
        raise InputError(problem, "a file with one stream, or several in a list")


def _read_message(file: DataFile, begin: int) -> _Message | None:
    """Return the message at a position; None for the one that ends the stream.

    Raises:
        struct.error: The file ends before, as of a writer that was killed, or it is damaged.
    """
    mark, length = MESSAGE_PREFIX.unpack(
        file.read(begin, min(begin + MESSAGE_PREFIX.size, file.size))
    )
    metadata_begin = begin + MESSAGE_PREFIX.size
    if mark != CONTINUATION:
        raise struct.error("no message")
    if not length:
        return None
    metadata = file.read(metadata_begin, min(metadata_begin + length, file.size))
    (table,) = struct.unpack_from("<I", metadata)
    kind = _read_number(metadata, table, MESSAGE_KIND, "<B")
    body_length = _read_number(metadata, table, MESSAGE_BODY_LENGTH, "<q")
    rows = 0
    if kind == RECORD_BATCH:
        place = _find_field(metadata, table, MESSAGE_HEADER)
        (distance,) = struct.unpack_from("<I", metadata, place)
        rows = _read_number(metadata, place + distance, BATCH_LENGTH, "<q")
    end = metadata_begin + length + body_length
    if not begin < end <= file.size or rows < 0:
        raise struct.error("the file ends before")
    return _Message(kind, rows, begin, end)


def _read_number(metadata: bytes, table: int, field: int, layout: str) -> int:
    """Return a number of a table in a FlatBuffer; 0 where it is left out."""
    place = _find_field(metadata, table, field)
    return int(struct.unpack_from(layout, metadata, place)[0]) if place else 0


def _find_field(metadata: bytes, table: int, field: int) -> int:
    """Return where a field of a table in a FlatBuffer is; 0 where it is left out."""
    (distance,) = struct.unpack_from("<i", metadata, table)
    directory = table - distance  # its own size, the size of the table, a place for each field
    entry = 4 + 2 * field
    (size,) = struct.unpack_from("<H", metadata, directory)
    if entry >= size:
        return 0
    (offset,) = struct.unpack_from("<H", metadata, directory + entry)
    return table + offset if offset else 0
