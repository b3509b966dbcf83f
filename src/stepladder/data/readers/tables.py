"""A source over Arrow tables, read one at a time: row groups of Parquet, batches of Arrow files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from stepladder.core.errors import InputError, as_input_error, get_reason
from stepladder.core.order import IndexArray
from stepladder.data.readers.batches import DECODE_HINT, Sample, decode_image, stack_values
from stepladder.data.readers.damage import Damage
from stepladder.data.readers.file_rows import OpenedSource, group_rows
from stepladder.data.readers.files import DataFile, validate_no_copies
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.table import Column, Ragged, join_lists, select_columns

POOL_BYTES = 48 << 20  # of tables in the memory of a process
MIN_TABLES = 4
MAX_TABLES = 64
VALUE_ERRORS = (ValueError, OverflowError, LookupError)
CHECKED_ROWS = 64  # at once
NO_COLUMN = "columns= without it"
NANOSECONDS = pa.time64("ns")
PARQUET_DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)
IMAGE_FIELDS = {"bytes", "path"}  # of a struct, in the files of Hugging Face's datasets


@dataclass(frozen=True)
class _TablePart:
    """A part of a file that is read at once.

    Args:
        file: The file's name.
        first_row: The number of its first row in that file.
        rows: The number of its rows.
        size: Its bytes in memory, about.
        read: Returns these columns as a table.
    """

    file: str
    first_row: int
    rows: int
    size: int
    read: Callable[[list[str]], Any]

    def make_damage(self, reason: str) -> Damage:
        """Return the damage that none of its rows can be read."""
        return Damage(self.file, self.first_row, self.rows, reason)


# Of a group of rows that is read at once: the number of rows, its bytes in memory, about, and a
# function that returns these columns of it as a table.
ReadColumns = Callable[[list[str]], Any]
Groups = Iterable[tuple[int, int, ReadColumns]]
ListGroups = Callable[[int], tuple[Any, Groups]]


class TableSource(OpenedSource):
    """Rows of many tables, some of which are in memory."""

    def __init__(
        self, format_name: str, files: list[DataFile], list_groups: ListGroups, options: OpenOptions
    ) -> None:
        """Find the parts of all files.

        Args:
            format_name: The name of the format.
            files: The files, whose rows follow each other.
            list_groups: Called with the number of a file; it returns the columns and the groups.
            options: What the caller of `open_data` has set.

        Raises:
            InputError: A file is damaged, or has other columns than the first, or no file has rows.
        """
        self.parts: list[_TablePart] = []
        listed = list(map(list_groups, range(len(files))))
        schema, _ = listed[0]
        for file, (file_schema, groups) in zip(files, listed, strict=True):
            if _list_fields(file_schema) != _list_fields(schema):
                fields = zip_longest(file_schema, schema, fillvalue=pa.field("nothing", pa.null()))
                found, first = next(pair for pair in fields if pair[0] != pair[1])
                problem = f"{file.name} has other columns than {files[0].name}"
                found = f"{found}, not {first}".replace("pyarrow.Field", "")
                raise InputError(f"{problem}: {found}", "a pattern of files that belong together")
            first_row = 0
            for rows, size, read in groups:
                if rows:
                    self.parts.append(_TablePart(file.name, first_row, rows, size, read))
                first_row += rows
        if not self.parts:
            raise InputError(f"{files[0].name} has no rows", "a file with rows")
        filled = {part.file for part in self.parts}
        validate_no_copies([file for file in files if file.name in filled])
        edges: IndexArray = np.cumsum([0, *(part.rows for part in self.parts)])
        super().__init__(files, edges, options)
        self.format = format_name
        self.names = select_columns(options.columns or (), schema.names, files[0].name)
        self.types = {name: schema.field(name).type for name in self.names}
        for name, kind in self.types.items():
            problem = f"cannot use {files[0].name}: column {name} is {kind}"
            with as_input_error(problem, NO_COLUMN, (*PARQUET_DAMAGE, NotImplementedError)):
                pa.schema({name: kind}).empty_table().take(pa.array([], pa.int64()))
        # What the columns of numbers are; None for others, and for all if `decode` takes values.
        self.numbers: dict[str, Column | None] = dict.fromkeys(self.names)
        if options.decode is None:
            self.numbers = {name: _find_numbers(kind) for name, kind in self.types.items()}
        largest = max(part.size for part in self.parts)
        self.chunks_in_memory = min(MAX_TABLES, max(MIN_TABLES, POOL_BYTES // max(1, largest)))
        self._load = lru_cache(options.tables_in_memory or self.chunks_in_memory)(self._read_part)

    @property
    def columns(self) -> dict[str, str]:
        """The name and the type of each column, as texts to print."""
        return {name: str(kind) for name, kind in self.types.items()}

    def read_samples(self, indices: IndexArray) -> list[Sample]:
        """Return each of these rows as a dict of values of Python."""
        columns = self._gather(indices)
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def read_columns(self, indices: IndexArray) -> dict[str, Any]:
        """Return these rows by column."""
        columns = self._gather(indices)
        return {name: self._finish(name, columns[name]) for name in self.names}

    def _finish(self, name: str, values: Any) -> Any:
        """Return a column of a batch; lists of numbers become Ragged."""
        if isinstance(values, np.ndarray):
            return values
        column = self.numbers[name]
        if column is not None and column.is_list:
            return join_lists(values)
        return stack_values(name, values, values[0])

    def _gather(self, indices: IndexArray) -> dict[str, Any]:
        """Return rows of several parts by column, in the order of their indices."""
        batch: dict[str, Any] = {}
        for number, places, rows in group_rows(self.edges, indices):
            for name, values in self._take(number, rows).items():
                if isinstance(values, np.ndarray):
                    if name not in batch:
                        batch[name] = np.empty((len(indices), *values.shape[1:]), values.dtype)
                    batch[name][places] = values
                    continue
                items = batch.setdefault(name, [None] * len(indices))
                for place, value in zip(places.tolist(), values, strict=True):
                    items[place] = value
        return batch

    def find_damage(self) -> Iterator[Damage]:
        """Read all rows, and yield those that cannot be read."""
        for part in self.parts:
            try:
                table = _read_table(part, self.names)
            except InputError as error:
                yield part.make_damage(error.problem)
                continue
            for name, numbers in self.numbers.items():
                column = table.column(name)
                if numbers is not None:
                    yield from _find_empty(part, name, column.combine_chunks())
                    continue
                is_image = _is_image(column.type)
                for first in range(0, len(column), CHECKED_ROWS):
                    _, errors = _read_values(column.slice(first, CHECKED_ROWS), is_image)
                    for place, cause in errors.items():
                        yield _make_value_damage(part, first + place, name, cause)

    def _take(self, number: int, rows: IndexArray) -> dict[str, Any]:
        """Return rows of a part by column: arrays, or lists."""
        part = self.parts[number]
        has_images = self.decode is None  # which gets values as they are
        try:
            columns = self._load(number)
            return {
                name: _take_rows(part, name, column, rows, has_images)
                for name, column in columns.items()
            }
        except PARQUET_DAMAGE as error:
            raise part.make_damage(get_reason(error)).as_error() from error

    def _read_part(self, number: int) -> dict[str, Any]:
        part = self.parts[number]
        table = _read_table(part, self.names)
        return {
            name: self._convert(part, name, table.column(name).combine_chunks())
            for name in self.names
        }

    def _convert(self, part: _TablePart, name: str, array: Any) -> Any:
        """Return an Arrow array as NumPy array or Ragged. Raises InputError for an empty value."""
        column = self.numbers[name]
        if column is None:
            return array
        for damage in _find_empty(part, name, array):
            raise InputError(str(damage), DECODE_HINT)
        flat = array.flatten() if column.is_list or column.shape else array
        values = flat.to_numpy(zero_copy_only=False)
        if column.is_list:
            offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
            return Ragged(values, offsets - offsets[0])
        return values.reshape(len(array), *column.shape)


def _list_fields(schema: Any) -> list[Any]:
    """Return the names and types of columns, whether or not a file says that none is empty."""
    return [field.with_nullable(True) for field in schema]


def _find_empty(part: _TablePart, name: str, array: Any) -> Iterator[Damage]:
    """Yield the rows of a column of numbers that are empty, or lists with an empty value."""
    if array.null_count or (types.is_nested(array.type) and array.flatten().null_count):
        for row, value in enumerate(array.to_pylist()):
            if value is None or (isinstance(value, list) and None in value):
                reason = f"column {name} has an empty value"
                yield Damage(part.file, part.first_row + row, 1, reason)


def _find_numbers(arrow_type: Any) -> Column | None:
    """Return the column of a type of numbers or lists of them; None for another type."""
    is_list = types.is_list(arrow_type) or types.is_large_list(arrow_type)
    shape: tuple[int, ...] = ()
    if types.is_fixed_size_list(arrow_type):
        shape = (arrow_type.list_size,)
    value_type = arrow_type.value_type if is_list or shape else arrow_type
    is_number = types.is_integer(value_type) or types.is_floating(value_type)
    if not is_number and not types.is_boolean(value_type):
        return None
    return Column(np.dtype(value_type.to_pandas_dtype()), shape, is_list)


def _take_rows(part: _TablePart, name: str, column: Any, rows: IndexArray, has_images: bool) -> Any:
    """Return rows of a column: an array, or a list."""
    if isinstance(column, np.ndarray):
        return column[rows]
    if isinstance(column, Ragged):
        begins = column.offsets[rows].tolist()
        ends = column.offsets[rows + 1].tolist()
        return [column.values[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return _list_values(part, name, column, rows, has_images and _is_image(column.type))


def _list_values(
    part: _TablePart, name: str, column: Any, rows: IndexArray, is_image: bool
) -> list[Any]:
    """Return rows of a column as values of Python, or as the arrays of images.

    Raises:
        InputError: One of them is damaged, or Python has no such value; it names the row.
    """
    values, errors = _read_values(column.take(pa.array(rows)), is_image)
    for place, error in errors.items():
        damage = _make_value_damage(part, int(rows[place]), name, error)
        if is_image or isinstance(error, UnicodeError):
            raise damage.as_error() from error
        raise InputError(str(damage), NO_COLUMN) from error
    return values


def _make_value_damage(part: _TablePart, row: int, name: str, error: Exception) -> Damage:
    """Return the damage that a value in a row of a part cannot be read."""
    return Damage(part.file, part.first_row + row, 1, f"column {name}: {error}")


def _read_values(column: Any, is_image: bool) -> tuple[list[Any], dict[int, Exception]]:
    """Return the values of Arrow as those of Python, or arrays of images; and errors by place."""
    if not is_image and column.type != NANOSECONDS:
        with suppress(*VALUE_ERRORS):
            return column.to_pylist(), {}  # in a tenth of the time
    values = []
    errors: dict[int, Exception] = {}
    for place, value in enumerate(column):
        try:
            values.append(_read_value(value, is_image))
        except VALUE_ERRORS as error:
            errors[place] = error
    return values, errors


def _read_value(value: Any, is_image: bool) -> Any:
    """Return a value of Arrow as one of Python, or as the array of an image.

    Raises:
        ValueError: The image is damaged, or Python has no such time.
    """
    if value.type == NANOSECONDS and value.is_valid and value.value % 1000:
        raise ValueError(f"Python's times have no nanoseconds, this is {value.value:,} ns")
    plain = value.as_py()
    if not is_image:
        return plain
    if not plain or not plain["bytes"]:
        raise ValueError("it has no bytes")
    return decode_image(plain["bytes"])


def _validate_memory(table: Any) -> None:
    """Raise ArrowInvalid if a value would lie out of its memory, where to read ends the process."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):  # of which the text is named that is not of it
            raise


def _read_table(part: _TablePart, names: list[str]) -> Any:
    """Return columns of a part as a table.

    Raises:
        InputError: It is damaged; the message has its file and its rows.
    """
    try:
        table = part.read(names)
        _validate_memory(table)
    except PARQUET_DAMAGE as error:
        raise part.make_damage(get_reason(error)).as_error() from error
    if len(table) != part.rows:
        raise part.make_damage(f"there are {len(table)} rows").as_error()
    return table


def _is_image(arrow_type: Any) -> bool:
    """Return whether a column holds images as Hugging Face's datasets write them."""
    is_struct = types.is_struct(arrow_type)
    return is_struct and {field.name for field in arrow_type} == IMAGE_FIELDS
