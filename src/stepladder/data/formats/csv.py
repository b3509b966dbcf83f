"""CSV files as tables: a header, then numbers. Errors name the line."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.typed_file import open_to_read
from stepladder.data.readers.json_values import is_value
from stepladder.data.table import BLOCK_ROWS, Block, Column, Table, identify_files, select_columns

INT64 = np.dtype(np.int64)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
NUMBER_ERRORS = (ValueError, OverflowError, FloatingPointError)
LEADING_ZERO = re.compile(r"^\s*[-+]?0[0-9]", re.MULTILINE)  # of a name such as 007
MAX_SHOWN = 60  # characters of a field in a message
Row = tuple[int, list[str]]  # line in the file, fields


@dataclass(frozen=True)
class CsvColumn:
    """A column of a CSV file: its name in the header, and its index in each line."""

    path: Path
    name: str
    index: int

    def fields(self, rows: list[Row]) -> list[str]:
        return [fields[self.index] for _, fields in rows]


def csv_table(path: Path, names: tuple[str, ...], dtypes: dict[str, str]) -> Table:
    """Return a CSV file as a table.

    Whole numbers become int64, others float32. The first 4,096 rows decide; a later value that is
    of another type is an error.

    Args:
        path: The file; its fields are separated by tabs if it ends in .tsv.
        names: The columns to read, all by default.
        dtypes: Types of columns that the user has set, by name.
    """
    with open_text(path) as text:
        rows = read_rows(path, text)
        _, header = next(rows)
        first_rows = list(islice(rows, BLOCK_ROWS))
    select_columns(tuple(dtypes), header, path)
    csv_columns = [
        CsvColumn(path, name, header.index(name)) for name in select_columns(names, header, path)
    ]
    columns = {}
    for column in csv_columns:
        if column.name in dtypes:
            columns[column.name] = Column(parse_dtype(column.name, dtypes[column.name]))
        else:
            columns[column.name] = Column(infer_dtype(column, first_rows))
    read = partial(read_csv, path, csv_columns)
    return Table(str(path), columns, identify_files("csv", path), read, path.stat().st_size)


def read_csv(path: Path, csv_columns: list[CsvColumn], table: Table) -> Iterator[Block]:
    with open_text(path) as text:
        lines = read_rows(path, text)
        next(lines)
        while rows := list(islice(lines, BLOCK_ROWS)):
            table.bytes_read = text.buffer.tell()
            yield {
                column.name: parse_column(column, rows, table.columns[column.name].dtype)
                for column in csv_columns
            }


def open_text(path: Path) -> TextIOWrapper[BinaryIO]:
    with as_input_error(
        f"cannot read {path}", "give a file that can be read", (OSError, ValueError)
    ):
        return TextIOWrapper(open_to_read(path), encoding="utf-8-sig", newline="")


def read_rows(path: Path, text: TextIOWrapper) -> Iterator[Row]:
    """Yield the rows of a CSV file with their line numbers, the header first.

    Yields:
        The number of the row's last line, from 1, and the fields of the row as text.

    Raises:
        InputError: A row is broken, or the file is empty.
    """  # noqa: DOC501 - line_error makes an InputError
    reader = csv.reader(text, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    header: list[str] = []
    try:
        for fields in reader:
            if header:
                validate_width(path, reader.line_num, fields, header)
            elif fields:
                validate_header(path, fields)
                header = fields
            else:
                continue  # an empty line before the header
            yield reader.line_num, fields
    except UnicodeDecodeError as error:
        raise line_error(path, reader.line_num + 1, str(error)) from error
    except (csv.Error, OSError) as error:
        raise line_error(path, reader.line_num, str(error)) from error
    if not header:
        raise InputError(f"{path} is empty", "give a CSV file with a header")


def validate_header(path: Path, fields: list[str]) -> None:
    has_duplicates = len(set(fields)) < len(fields)
    has_numbers = any(map(is_value, fields))
    if has_duplicates or has_numbers or not all(fields):
        raise InputError(
            f"{path}, line 1 is not a header: {','.join(fields)[:80]}",
            "a first line that names the columns",
        )


def validate_width(path: Path, line: int, fields: list[str], header: list[str]) -> None:
    if len(fields) != len(header):
        raise line_error(path, line, f"{len(fields)} columns, the header has {len(header)}")


def line_error(path: Path, line: int, problem: str) -> InputError:
    return InputError(
        f"{path}, line {line}: {problem}", f"correct that line: sed -n {line}p {path.name}"
    )


# -- types and numbers -----------------------------------------------------------------------------


def parse_dtype(name: str, text: str) -> np.dtype[Any]:
    """Return the type of --dtype NAME=TEXT. Raises InputError if it is not a type of numbers."""
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses "f8,(2,)f8" as Python
        dtype = np.dtype(object)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise InputError(
            f"--dtype {name}={text} is not a type of numbers", f"--dtype {name}=float32"
        )
    return dtype


def infer_dtype(column: CsvColumn, rows: list[Row]) -> np.dtype[Any]:
    fields = column.fields(rows) or ["0"]
    for dtype in (INT64, FLOAT32):
        if is_number(fields, dtype):
            return dtype
    raise value_error(column, rows, FLOAT32)


def parse_column(column: CsvColumn, rows: list[Row], dtype: np.dtype[Any]) -> np.ndarray:
    """Return the numbers of a column. Raises InputError for the first one of another type."""
    try:
        return parse_numbers(column.fields(rows), dtype)
    except NUMBER_ERRORS:
        raise value_error(column, rows, dtype) from None


def parse_numbers(fields: str | list[str], dtype: np.dtype[Any]) -> np.ndarray:
    """Return the numbers. Raises one of NUMBER_ERRORS, also if one would become infinite."""
    texts = np.array(fields)
    validate_digits("\n".join(texts.flat))
    with np.errstate(over="raise"):
        numbers: np.ndarray = texts.astype(dtype)
    if dtype.kind == "f":
        is_infinite = np.isinf(numbers)
        if is_infinite.any() and "inf" not in "".join(texts[is_infinite].flat).lower():
            raise OverflowError  # such as 1e400
    return numbers


def validate_digits(text: str) -> None:
    """Raise ValueError for lines that Python takes for numbers, and other programs may not."""
    if not text.isascii() or "_" in text or LEADING_ZERO.search(text):
        raise ValueError("digits of other scripts, an underscore, or a leading zero")


def is_number(fields: str | list[str], dtype: np.dtype[Any]) -> bool:
    """Return whether a text, or each of several, is a number of this type."""
    try:
        parse_numbers(fields, dtype)
    except NUMBER_ERRORS:
        return False
    return True


def value_error(column: CsvColumn, rows: list[Row], dtype: np.dtype[Any]) -> InputError:
    """Make the error for the first value that is not of its column's type.

    Args:
        column: The column, with the path of its file.
        rows: Rows of the file, at least one of which has such a value.
        dtype: The type of the column.

    Returns:
        The error, whose hint names a wider type if there is one that can hold the value.
    """
    line, text = next(
        (line, fields[column.index])
        for line, fields in rows
        if not is_number(fields[column.index], dtype)
    )
    shown = repr(text[:MAX_SHOWN])
    if not is_number_of_any_size(text):
        problem = f"not a number: {shown}"
    elif dtype.kind == "f":
        problem = f"{shown}, too large for {dtype}"
    else:
        problem = f"{shown}, not {dtype}"
    wider = next((kind for kind in (FLOAT32, FLOAT64) if is_number(text, kind)), None)
    if wider is None:
        fix = "omit the column: --columns NAME,NAME"
    else:
        fix = f"--dtype {column.name}={wider}"
    return InputError(
        f"{column.path}, line {line}: column {column.name} is {problem}",
        f"correct the line, or {fix}",
    )


def is_number_of_any_size(text: str) -> bool:
    try:
        validate_digits(text)
        float(text)
    except ValueError:
        return False
    return True
