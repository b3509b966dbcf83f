"""JSON Lines and CSV: a record is a line, found by an index of lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.order import IndexArray
from stepladder.data.readers.batches import Sample
from stepladder.data.readers.damage import DAMAGE_HINT
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.records import IndexedFiles, RecordSource

SCANNED_BYTES = 16 << 20  # at once
NEWLINE = 10
QUOTE = 34
BLANKS = (NEWLINE, 13)  # of lines that hold nothing: they belong to the record before
TYPED_RECORDS = 256  # from which the types of columns are known
MAX_HEADER_BYTES = 1 << 20


def find_lines(
    file: DataFile,
    has_quotes: bool,
    first_byte: int = 0,
) -> Iterator[IndexArray]:
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


class JsonLines(IndexedFiles):
    """A JSON object a line.

    Attributes:
        types: Of each column of numbers or lists of numbers, by the first records.
        ragged: The columns whose lists differ in length.
    """

    name = "jsonl"

    def __init__(
        self,
        files: list[DataFile],
        options: OpenOptions,
    ) -> None:
        super().__init__(files, lambda file: find_lines(file, has_quotes=False), options)
        self.types: dict[str, ValueType] = {}
        if options.decode is None:  # which takes values as they are
            first = list(self._read_first())
            self.types = {name: find_value_type(first, name) for name in collect_names(first)}
        self.ragged = frozenset(name for name, kind in self.types.items() if kind.is_ragged)

    def parse(
        self,
        number: int,
        data: bytes,
        names: frozenset[str] | None,
    ) -> Sample:
        """Return the object. Lists of numbers become arrays.

        Raises:
            ValueError: It is no JSON object, or a value has another type than in the first records.
        """
        sample = parse_object(data)
        for name in sample if names is None else names:
            kind = self.types.get(name)
            if kind is not None and name in sample:
                sample[name] = kind.convert(name, sample[name])
        return sample

    def _read_first(self) -> Iterator[Sample]:
        """Yield the first records of the first file, without those that are damaged."""
        offsets = self.get_offsets(0)[: TYPED_RECORDS + 1].tolist()
        for begin, end in pairwise(offsets):
            with suppress(ValueError):  # it is reported when it is read
                yield parse_object(self.files[0].read(begin, end))


def parse_object(data: bytes) -> Sample:
    """Return a JSON object, or raise ValueError."""
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("its lists are nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


@dataclass(frozen=True)
class ValueType:
    """What the values of a column of JSON have in common.

    Attributes:
        kind: bool, int or float; list for lists of numbers; object for all else.
        dtype: Of the numbers in lists.
        shape: Of lists of one length.
        is_ragged: Whether lists differ in length.
    """

    kind: type
    dtype: Any = None
    shape: tuple[int, ...] = ()
    is_ragged: bool = False

    def convert(
        self,
        name: str,
        value: Any,
    ) -> Any:
        """Return a value as one of this type.

        Raises:
            ValueError: It has another type.
        """
        if type(value) is self.kind and self.kind is not list:
            return value
        if self.kind is float and type(value) is int:
            return float(value)
        if self.kind is object:
            return value
        if self.kind is list and isinstance(value, list):
            array = np.asarray(value or np.empty(0, self.dtype))
            fits = array.ndim == 1 if self.is_ragged else array.shape == self.shape
            if fits and np.can_cast(array.dtype, self.dtype, "same_kind"):
                return array.astype(self.dtype)
        raise ValueError(f"{name} has another type than in the first records")


def collect_names(samples: list[Sample]) -> list[str]:
    """Return the names of all columns of samples."""
    return list(dict.fromkeys(name for sample in samples for name in sample))


def find_value_type(samples: list[Sample], name: str) -> ValueType:
    """Return the type that a column has in all samples."""
    values = [sample[name] for sample in samples if name in sample]
    kinds = {type(value) for value in values}
    if kinds == {int, float}:
        return ValueType(float)
    if len(kinds) == 1 and kinds <= {bool, int, float}:
        return ValueType(kinds.pop())
    if kinds != {list}:
        return ValueType(object)
    try:
        arrays = [np.asarray(value) for value in values if value]
    except ValueError:  # lists of lists of several lengths
        return ValueType(object)
    if not arrays or any(array.dtype.kind not in "bif" for array in arrays):
        return ValueType(object)
    has_fractions = any(array.dtype.kind == "f" for array in arrays)
    dtype = np.dtype(np.float32 if has_fractions else np.int64)
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1 and len(arrays) == len(values):
        return ValueType(list, dtype, shapes.pop())
    if all(array.ndim == 1 for array in arrays):
        return ValueType(list, dtype, is_ragged=True)
    return ValueType(object)


class CsvLines(IndexedFiles):
    """A line of values after a header line with the names of the columns."""

    name = "csv"
    ragged: frozenset[str] = frozenset()

    def __init__(
        self,
        files: list[DataFile],
        options: OpenOptions,
    ) -> None:
        super().__init__(files, self._find_rows, options)
        self.delimiter = "\t" if files[0].name.endswith(".tsv") else ","
        self.header = self._read_header(files[0])[0]
        self.converters: list[Callable[[str], Any]] = [str] * len(self.header)
        if options.decode is None:  # which takes texts
            self.converters = self._find_types()

    def parse(
        self,
        number: int,
        data: bytes,
        names: frozenset[str] | None,
    ) -> Sample:
        """Return the values of a line: whole numbers, numbers or texts.

        Raises:
            ValueError: It has another number of values, or no number where others have one.
        """
        values = self._split(data)
        if len(values) != len(self.header):
            raise ValueError(f"it has {len(values)} values, the header {len(self.header)}")
        return {
            name: convert(text)
            for name, convert, text in zip(self.header, self.converters, values, strict=True)
        }

    def _split(self, data: bytes) -> list[str]:
        lines = io.StringIO(data.decode(), newline="")
        try:
            rows = [row for row in csv.reader(lines, delimiter=self.delimiter, strict=True) if row]
        except csv.Error as error:
            raise ValueError(str(error)) from error
        if len(rows) != 1:
            raise ValueError(f"it has {len(rows)} lines")
        return rows[0]

    def _find_rows(self, file: DataFile) -> Iterator[IndexArray]:
        header, first_byte = self._read_header(file)
        if header != self.header:
            problem = f"{file.name} has other columns than {self.files[0].name}"
            raise InputError(problem, "files with one header line")
        return find_lines(file, has_quotes=True, first_byte=first_byte)

    def _read_header(self, file: DataFile) -> tuple[list[str], int]:
        """Return the names of the columns, and where the first line after them begins."""
        head = file.read(0, min(MAX_HEADER_BYTES, file.size))
        line, _, _ = head.partition(b"\n")
        try:
            names = self._split(line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r"))
        except ValueError as error:
            raise InputError(
                f"{file.name}: its first line has no names: {error}", DAMAGE_HINT
            ) from error
        return names, min(len(line) + 1, file.size)

    def _find_types(self) -> list[Callable[[str], Any]]:
        """Return what makes values of texts, by the first records."""
        offsets = self.get_offsets(0)[: TYPED_RECORDS + 1].tolist()
        rows: list[list[str]] = []
        for begin, end in pairwise(offsets):
            with suppress(ValueError):  # it is reported when it is read
                rows.append(self._split(self.files[0].read(begin, end)))
        columns = zip(*(row for row in rows if len(row) == len(self.header)), strict=True)
        return [find_type(texts) for texts in columns] or self.converters


def find_type(texts: Sequence[str]) -> Callable[[str], Any]:
    """Return int, float or str: the first that takes all texts."""
    for kind in (int, float):
        try:
            for text in texts:
                kind(text)
        except ValueError:
            continue
        return kind
    return str


def open_json_lines(files: list[DataFile], options: OpenOptions) -> RecordSource:
    """Return the objects of JSON Lines files."""
    return RecordSource(files, JsonLines(files, options), options)


def open_csv(files: list[DataFile], options: OpenOptions) -> RecordSource:
    """Return the rows of CSV files."""
    return RecordSource(files, CsvLines(files, options), options)
