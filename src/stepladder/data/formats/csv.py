"""CSV files as tables: a header, then numbers. Errors name the line."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.typed_file import open_to_read
from stepladder.data.table import BLOCK_ROWS, Block, Column, Table, chosen, identity

FLOAT = np.dtype(np.float32)
NO_NUMBER = (ValueError, OverflowError, FloatingPointError)
Row = tuple[int, list[str]]  # line in the file, fields


def csv_table(path: Path, names: tuple[str, ...], dtypes: dict[str, str]) -> Table:
    """The columns `names` (all by default). Whole numbers become int64, others float32, unless
    dtypes says else.

    The type of a column is decided by the first 4,096 rows; a later value that does not fit is an
    error."""
    with open_text(path) as text:
        lines = read_lines(path, text)
        header, first = next(lines)[1], list(islice(lines, BLOCK_ROWS))
    chosen(tuple(dtypes), header, path)
    places = {name: header.index(name) for name in chosen(names, header, path)}
    columns = {
        name: Column(column_type(path, name, place, first, dtypes))
        for name, place in places.items()
    }
    read = partial(read_csv, path, places)
    return Table(str(path), columns, identity("csv", path), read, path.stat().st_size)


def read_csv(path: Path, places: dict[str, int], table: Table) -> Iterator[Block]:
    """places: of the columns in a line."""
    with open_text(path) as text:
        lines = read_lines(path, text)
        next(lines)
        while rows := list(islice(lines, BLOCK_ROWS)):
            table.done = text.buffer.tell()
            yield {n: values(path, n, places[n], rows, c.dtype) for n, c in table.columns.items()}


def open_text(path: Path) -> TextIOWrapper[BinaryIO]:
    with as_input_error(
        f"cannot read {path}", "give a file that can be read", (OSError, ValueError)
    ):
        return TextIOWrapper(open_to_read(path), encoding="utf-8-sig", newline="")


def read_lines(path: Path, text: TextIOWrapper) -> Iterator[Row]:
    """The rows of a CSV file, the header first, each with its line. InputError for a broken one."""
    reader = csv.reader(text, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    width = 0
    try:
        for row in reader:
            if not width:
                if not row:
                    continue
                if (
                    len(set(row)) < len(row)
                    or not all(row)
                    or any(is_number(field) for field in row)
                ):
                    found = f"{path}, line 1 is not a header: {','.join(row)[:80]}"
                    raise InputError(found, "a first line that names the columns")
                width = len(row)
            elif len(row) != width:
                raise broken(path, reader.line_num, f"{len(row)} columns, the header has {width}")
            yield reader.line_num, row
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise broken(
            path, reader.line_num + isinstance(error, UnicodeDecodeError), str(error)
        ) from error
    if not width:
        raise InputError(f"{path} is empty", "give a CSV file with a header")


def is_number(text: str | np.ndarray, dtype: np.dtype[Any] = FLOAT) -> bool:
    """Whether it is one of this type, or all of them are."""
    try:
        converted(text, dtype)
    except NO_NUMBER:
        return False
    return True


def converted(texts: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Raises one of NO_NUMBER, also where a number would become infinite."""
    texts = np.asarray(texts)
    refuse_other_digits("".join(texts.flat))
    with np.errstate(over="raise"):
        found: np.ndarray = texts.astype(dtype)
    if (
        dtype.kind == "f"
        and np.isinf(found).any()
        and "inf" not in "".join(texts[np.isinf(found)].flat).lower()
    ):
        raise OverflowError  # 1e400
    return found


def refuse_other_digits(text: str) -> None:
    """Raises ValueError for what Python takes too."""
    if not text.isascii() or "_" in text:
        raise ValueError("digits of other letters, or an underscore")


def broken(path: Path, line: int, what: str) -> InputError:
    return InputError(f"{path}, line {line}: {what}", f"mend that line: sed -n {line}p {path.name}")


def column_type(
    path: Path, name: str, place: int, rows: list[Row], dtypes: dict[str, str]
) -> np.dtype[Any]:
    if name in dtypes:
        try:
            dtype = np.dtype(dtypes[name])
        except (TypeError, ValueError, SyntaxError):  # it reads "f8,(2,)f8" too, as Python
            dtype = np.dtype(object)
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise InputError(
                f"--dtype {name}={dtypes[name]} is not a type of numbers", f"--dtype {name}=float32"
            )
        return dtype
    fields = np.array([row[place] for _, row in rows] or ["0"])
    for dtype in (np.dtype(np.int64), FLOAT):
        if is_number(fields, dtype):
            return dtype
    raise misfit(path, name, place, rows, FLOAT)


def values(path: Path, name: str, place: int, rows: list[Row], dtype: np.dtype[Any]) -> np.ndarray:
    """One column of a block. InputError names the line of the first value that is of another type."""
    fields = np.array([row[place] for _, row in rows])
    try:
        return converted(fields, dtype)
    except NO_NUMBER:
        raise misfit(path, name, place, rows, dtype) from None


def misfit(path: Path, name: str, place: int, rows: list[Row], dtype: np.dtype[Any]) -> InputError:
    """Of a column's first value that is not of its type: whether another type would hold it."""
    line, text = next((line, row[place]) for line, row in rows if not is_number(row[place], dtype))
    wider = next((kind for kind in (FLOAT, np.dtype(np.float64)) if is_number(text, kind)), None)
    what = f"{text[:60]!r}, {'too large for' if dtype.kind == 'f' else 'not'} {dtype}"
    try:
        refuse_other_digits(text)
        float(text)
    except ValueError:
        what = f"not a number: {text[:60]!r}"
    other = f"--dtype {name}={wider}" if wider else "leave the column away: --columns NAME,NAME"
    return InputError(f"{path}, line {line}: column {name} is {what}", f"mend the line, or {other}")
