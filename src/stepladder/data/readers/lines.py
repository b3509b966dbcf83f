"""JSON Lines and CSV: a record is a line, found by an index of lines."""

from __future__ import annotations

import csv
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np

from stepladder.core.console import print_message
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.order import IndexArray
from stepladder.core.world import is_first_rank
from stepladder.data.readers.batches import FLOAT32, INT64, Sample
from stepladder.data.readers.damage import DAMAGE_HINT, ENCODING_HINT
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.json_values import (
    ValueType,
    collect_names,
    find_value_type,
    is_value,
    parse_numbers,
    parse_object,
)
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.records import IndexedSource
from stepladder.data.table import select_columns

SCANNED_BYTES = 16 << 20  # at once
NEWLINE = 10
QUOTE = 34
BLANKS = (NEWLINE, 13)  # of lines that hold nothing: they belong to the record before
QUOTED = re.compile(r'["\r\n]')  # in lines that need the rules of CSV
QUOTED_TWICE = re.compile(r'".*"".*"', re.DOTALL)  # a text that CSV would have written
CSV_HINT = 'quotation marks around a value that has some, and these twice: "5"" disk"'
TSV_HINT = "quotation marks around the names too, if they are those of CSV; or correct the line"
WORD_HINT = (
    "correct the file; or open_data(PATH, columns=[NAMES]) without this column, or"
    " decode=FUNCTION, which makes a number of such a value"
)
ROUND_HINT = "decode=FUNCTION, which gets the value itself; or smaller numbers, such as differences"
MAX_HEADER_BYTES = 1 << 20
WHOLE_IN_FLOAT32 = 1 << 24  # up to which it has all whole numbers
MAX_WHOLE = 1 << 63  # beyond it are measures such as 6e23, not times and identifiers
MAX_FIELD_BYTES = (1 << 31) - 1
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
END_MARK = b"\x1a"  # of DOS
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
EXCEL_LINE = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=.?"?\r?\n', re.IGNORECASE)
HTML = re.compile(rb"\s*<(?:!doctype\s+)?html\b", re.IGNORECASE)
DIGIT = re.compile(r"\d")  # of a text that is a name or a code, such as 12a
OTHER_DELIMITERS = re.compile(r"[;|\t,]")
# The limit of a process, which saves nothing here: a field is in memory before it is parsed.
csv.field_size_limit(MAX_FIELD_BYTES)
_print_once = cache(print_message)  # of a file that is opened again


def find_lines(file: DataFile, has_quotes: bool, first_byte: int = 0) -> Iterator[IndexArray]:
    """Yield where lines begin, and where the last one ends. Empty lines belong to the one before.

    Args:
        file: The file.
        has_quotes: Whether a line break between quotation marks belongs to its line.
        first_byte: Where the first line begins.
    """
    pending = True  # whether the next byte that is no line break begins a line
    is_open = 0  # whether there is an open quotation mark
    for begin in range(first_byte, file.size, SCANNED_BYTES):
        end = min(begin + SCANNED_BYTES, file.size)
        block = np.frombuffer(file.read(begin, end), np.uint8)
        breaks = np.flatnonzero(block == NEWLINE)
        if has_quotes:
            quotes = np.flatnonzero(block == QUOTE)
            before = quotes.searchsorted(breaks) + is_open
            breaks = breaks[before % 2 == 0]
            is_open = (is_open + len(quotes)) % 2
        starts = breaks[breaks + 1 < len(block)] + 1
        if pending and len(block):
            starts = np.concatenate([np.zeros(1, np.int64), starts])
        pending = bool(len(breaks)) and int(breaks[-1]) == len(block) - 1
        is_blank = np.isin(block[starts], BLANKS)
        yield starts[~is_blank] + begin
    yield np.array([file.size], np.int64)


def _read_head(file: DataFile) -> bytes:
    """Return the first bytes of a text.

    Raises:
        InputError: It is not of UTF-8, has no line break, is a page of HTML, or is for Excel alone.
    """
    head = file.read(0, min(MAX_HEADER_BYTES, file.size))
    if head[:2] in UTF_16_MARKS or head[:2].count(0) == 1:
        problem = "it is UTF-16, not UTF-8"
        command = "iconv -f UTF-16 -t UTF-8"
    elif b"\r" in head.strip(b"\r") and b"\n" not in head and b"\0" not in head:
        problem = "its lines end with CR alone, as on old Macs"
        command = r"tr '\r' '\n' <"
    elif HTML.match(head):
        raise InputError(f"{file.name} is a page of HTML", "download the file itself")
    elif EXCEL_LINE.match(head):
        problem = "its first line has no names: it tells Excel the separator"
        command = "tail -n +2"
    else:
        return head
    names = map(shlex.quote, (file.name, f"new-{PurePath(file.name).name}"))
    hint = f"{command} {' > '.join(names)}"
    raise InputError(f"{file.name}: {problem}", hint)


class JsonLinesSource(IndexedSource):
    """A JSON object a line."""

    format = "jsonl"

    def __init__(self, files: list[DataFile], options: OpenOptions) -> None:
        super().__init__(files, options)
        # The type of each column, by the first records.
        self.types: dict[str, ValueType] = {}
        if options.decode is None:  # which takes values as they are
            first = self.parse_first(options.typed_records)
            for name in options.columns or collect_names(list(first.values())):
                values = {row: sample[name] for row, sample in first.items() if name in sample}
                label = f"{name} of {files[0].name}"
                self.types[name] = find_value_type(label, list(values.values()))
                if self.types[name] == ValueType(float):
                    _report_rounded(self, name, values)

    def find_offsets(self, file: DataFile) -> Iterator[IndexArray]:
        """Yield where lines begin, and where the last one ends."""
        _read_head(file)
        return find_lines(file, has_quotes=False)

    def parse(self, number: int, data: bytes, names: frozenset[str] | None) -> Sample:
        """Return the object.

        Raises:
            ValueError: It is no JSON object.
        """
        return parse_object(data)

    def make_column(self, name: str, values: list[Any], first: Any) -> Any:
        """Return values of a column as one array; lists of several lengths as Ragged.

        Raises:
            ValueError: A value has another type than in the first records.
        """
        return self.types[name].make_column(name, values)


class CsvSource(IndexedSource):
    """A line of values after a header line with the names of the columns."""

    format = "csv"

    def __init__(self, files: list[DataFile], options: OpenOptions) -> None:
        suffix = PurePath(files[0].name).suffix
        self.delimiter = "\t" if suffix.lower() == ".tsv" else ","
        # The names of the columns as the caller gives them, or None.
        self.given_header = None if options.header is None else list(options.header)
        # Where the first line of values of each file begins.
        self.first_bytes: dict[str, int] = {}
        # Whether quotation marks in each file are those of CSV, not characters of its texts.
        self.has_quotes: dict[str, bool] = {}
        for file in files:
            header, self.first_bytes[file.name] = self._read_header(file)
            if file is files[0]:
                self.header = header
            elif header != self.header:
                problem = f"{file.name} has other columns than {files[0].name}"
                raise InputError(problem, "files with one header line")
        super().__init__(files, options)
        # The type of the numbers of each column, None for texts.
        self.types: dict[str, np.dtype[Any] | None] = {}
        if options.decode is None:  # which takes texts
            self.types = self._find_types(options)

    def get_index_kind(self, file: DataFile) -> str:
        """Return what an index of a file depends on besides the file."""
        first_byte = self.first_bytes[file.name]
        if self.has_quotes[file.name]:
            return f"csv {first_byte}"
        return f"tsv {first_byte}"

    def parse(self, number: int, data: bytes, names: frozenset[str] | None) -> Sample:
        """Return the values of a line as texts.

        Raises:
            InputError: It has another number of values than the header, or quotation marks that may
                mean two things.
        """
        has_quotes = self.has_quotes[self.files[number].name]
        values = self._split(data, has_quotes)
        has_marks = not has_quotes and b'"' in data
        hint = DAMAGE_HINT
        if has_marks:
            hint = TSV_HINT
        problem = ""
        if len(values) != len(self.header):
            problem = f"it has {len(values)} values, the header {len(self.header)}"
        elif has_marks and any(map(QUOTED_TWICE.fullmatch, values)):
            problem = "it has quotation marks that are doubled, as in CSV"
        elif data.startswith((b"\0", END_MARK)) or data.endswith(b"\0"):
            problem = "it has bytes that are no text"
        elif data.startswith(BYTE_ORDER_MARK) or (values == self.header and len(values) > 1):
            problem = "it is the begin of another file, joined to this one"
            hint = "the files themselves, in a list"
        if problem:
            raise InputError(problem, hint)
        return dict(zip(self.header, values, strict=True))

    def make_column(self, name: str, values: list[Any], first: Any) -> Any:
        """Return texts, or an array of the numbers that they are.

        Raises:
            ValueError: One of them is no number where others are, or a very large one.
        """
        dtype = self.types[name]
        if dtype is None:
            return values
        try:
            return parse_numbers(values, dtype)
        except OverflowError as error:
            raise ValueError(f"{name}: {values[0]!r:.80} is too large for {dtype}") from error
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _split(self, data: bytes, has_quotes: bool) -> list[str]:
        """Return the values of a line, which may have line breaks between quotation marks of CSV.

        Raises:
            InputError: It has none, or its quotation marks or line breaks are not those of CSV.
        """
        text = data.decode()
        line = text.rstrip("\r\n")
        if line and not (has_quotes and QUOTED.search(line)):
            return line.split(self.delimiter)  # in half the time
        try:
            values = next(csv.reader([text], delimiter=self.delimiter, strict=True))
        except csv.Error as error:
            if '"' not in text:  # but line breaks of old Macs
                raise InputError(str(error), DAMAGE_HINT) from error
            raise InputError("a quotation mark in it is not one of CSV", CSV_HINT) from error
        if not values:
            raise InputError("it has no values", DAMAGE_HINT)
        return values

    def find_offsets(self, file: DataFile) -> Iterator[IndexArray]:
        """Yield where lines of values begin, and where the last one ends."""
        return find_lines(file, self.has_quotes[file.name], self.first_bytes[file.name])

    def _read_header(self, file: DataFile) -> tuple[list[str], int]:
        """Return the names of the columns, and where the first line after them begins."""
        head = _read_head(file)
        end = head.find(b"\n")
        has_quotes = self._uses_quotes(head.partition(b"\n")[0])
        self.has_quotes[file.name] = has_quotes
        # A name may have a line break.
        while has_quotes and end >= 0 and head.count(b'"', 0, end) % 2:
            end = head.find(b"\n", end + 1)
        line = head if end < 0 else head[: end + 1]
        with as_input_error(f"{file.name}: its first line", ENCODING_HINT, (UnicodeDecodeError,)):
            line.decode()
        hint = "a first line with the names of columns; or header=[NAMES]"
        try:
            names = self._split(line.removeprefix(BYTE_ORDER_MARK), has_quotes)
        except (ValueError, InputError) as error:
            reason = getattr(error, "problem", error)
            problem = f"{file.name}: its first line has no names: {reason}"
            raise InputError(problem, hint) from error
        if self.given_header is not None:
            mark = len(BYTE_ORDER_MARK) if line.startswith(BYTE_ORDER_MARK) else 0
            return self.given_header, len(line) if names == self.given_header else mark
        for name, count in Counter(names).items():
            if count > 1:
                problem = f"{count} columns of its first line are called {name!r:.80}"
                raise InputError(f"{file.name}: {problem}", hint)
            if is_value(name):
                problem = f"its first line has {name!r:.80}, a value and no name of a column"
                raise InputError(f"{file.name}: {problem}", hint)
        if len(names) == 1 and OTHER_DELIMITERS.search(names[0].replace(self.delimiter, "")):
            problem = f"its first line has one name, {names[0]!r:.80}, not several between"
            hint = "commas between values in a .csv file, tabs in a .tsv file"
            raise InputError(f"{file.name}: {problem} {self.delimiter!r}", hint)
        return names, len(line)

    def _uses_quotes(self, line: bytes) -> bool:
        """Return whether quotation marks are those of CSV, by the first line of a file.

        They are in a .csv file. In a .tsv file they are if names are between them, else a line
        break always ends a record: most programs write such marks as they are in the texts.
        """
        values = line.decode("utf-8-sig", "replace").rstrip("\r").split("\t")
        names = [value.strip('"') for value in values]
        is_quoted = names != values and self.given_header in (None, names)
        return self.delimiter == "," or is_quoted

    def _find_types(self, options: OpenOptions) -> dict[str, np.dtype[Any] | None]:
        """Return the types of the columns, by the first records and what the caller has set."""
        rows = self.parse_first(options.typed_records)
        types = {name: _find_type([row[name] for row in rows.values()]) for name in self.header}
        given = options.dtypes or {}
        for name in self.names:
            if options.dtypes is None:
                self._report_words(name, rows)
            if types[name] == FLOAT32 and name not in given:
                _report_rounded(self, name, {row: float(rows[row][name]) for row in rows})
        if options.dtypes is None:
            return types
        select_columns(tuple(given), self.header, self.files[0].name)
        return {name: given.get(name, dtype or FLOAT32) for name, dtype in types.items()}

    def _report_words(self, name: str, rows: dict[int, Sample]) -> None:
        """Print a line on rank 0 if a column is text because of a few words, such as "n/a".

        It may be text all the same: of the names of chromosomes, X and Y are no numbers.

        Args:
            name: The column.
            rows: The first records by the number of the sample.
        """
        words = [index for index, row in rows.items() if _find_type([row[name]]) is None]
        has_digits = any(DIGIT.search(rows[index][name]) for index in words)
        if not words or has_digits or 2 * len(words) >= len(rows) or not is_first_rank():
            return
        file, row = self.find_record(words[0])
        problem = f"{file}: column {name} is read as text: most of its values are numbers, but"
        value = rows[words[0]][name]
        _print_once(str(InputError(f"{problem} record {row} has {value!r:.80}", WORD_HINT)))


def _report_rounded(source: IndexedSource, name: str, values: dict[int, float]) -> None:
    """Print a line on rank 0 if float32 changes a large number of a column, such as a time.

    Args:
        source: Reads the column as float32.
        name: The column.
        values: Its first values by the number of the sample.
    """
    for index, value in values.items():
        is_large = WHOLE_IN_FLOAT32 < abs(value) < MAX_WHOLE
        if is_large and float(np.float32(value)) != value and is_first_rank():
            file, row = source.find_record(index)
            problem = f"{file}: column {name} is read as float32, which rounds {value} in record"
            _print_once(str(InputError(f"{problem} {row}", ROUND_HINT)))
            return


def _find_type(texts: list[str]) -> np.dtype[Any] | None:
    """Return int64 or float32, the first that takes all texts; None if they are no numbers."""
    for dtype in (INT64, FLOAT32):
        with suppress(ValueError):
            with suppress(OverflowError):  # which is told when such a number is read
                parse_numbers(texts, dtype)
            return dtype
    return None
