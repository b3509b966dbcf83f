"""A source whose samples are records: each is a range of bytes in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.order import IndexArray
from stepladder.data.local_files import make_change_error
from stepladder.data.readers.batches import DECODE_HINT, Sample, collate_decoded
from stepladder.data.readers.damage import Damage, locate_error
from stepladder.data.readers.file_rows import FileRows
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.record_index import FindOffsets, load_index
from stepladder.data.table import Ragged, select_columns

MAX_FIRST_RECORDS = 16  # of which one shows the columns; the others may be damaged
OPEN_INDEXES = 64  # the most files whose offsets are kept in memory


class _RecordFormat(Protocol):
    """How a format divides its files into records.

    The `number` of a file is its index in the list of files.
    """

    # The name of the format.
    name: str

    def get_offsets(self, number: int) -> IndexArray:
        """Return where the records of a file begin, and where the last one ends."""
        ...

    def get_counts(self) -> list[int]:
        """Return the number of records of each file."""
        ...

    def parse(self, number: int, data: bytes, names: frozenset[str] | None) -> Sample:
        """Return the values of a record by column.

        Args:
            number: The number of its file.
            data: The bytes of the record.
            names: The columns that are needed, others may be left out; None for all.

        Raises:
            ValueError: The record is damaged.
            InputError: The same, with a HINT.
        """
        ...

    def make_column(self, name: str, values: list[Any], first: Any) -> Any:
        """Return the values of one column as an array, as Ragged, or as the same list.

        Args:
            name: The column.
            values: The values.
            first: Its value in the first record, which has the type of the column.

        Raises:
            ValueError: A value is of another type than the column.
            InputError: The same, with a HINT.
        """
        ...


class IndexedFiles:
    """The offsets of the records in files of a format that needs an index of them.

    Args:
        files: The files.
        find_offsets: Finds the offsets of a file, to make its index.
    """

    # The name of the format.
    name: str

    def __init__(
        self, files: list[DataFile], find_offsets: FindOffsets, options: OpenOptions
    ) -> None:
        self.files = files
        self.find_offsets = find_offsets
        # Whether an index is written beside its file, not into the cache.
        self.writes_beside_files = options.index_beside
        # Returns the offsets of the file with a number, as in `_RecordFormat`.
        self.get_offsets = lru_cache(OPEN_INDEXES)(self._load)
        # The length of the offsets of each file that was read before, by its number.
        self.lengths: dict[int, int] = {}

    def _load(self, number: int) -> IndexArray:
        file = self.files[number]
        kind = self.get_index_kind(file)
        offsets = load_index(file, self.find_offsets, kind, self.writes_beside_files)
        # The cache of `get_offsets` drops some offsets, and these are loaded once more.
        expected_length = self.lengths.setdefault(number, len(offsets))
        if len(offsets) != expected_length:
            raise make_change_error(file.name)
        return offsets

    def get_index_kind(self, file: DataFile) -> str:
        """Return what an index of a file depends on besides the file."""
        return self.name

    def parse_first(self, parse: Callable[[bytes], Sample], count: int) -> list[Sample]:
        """Return the first records, `count` at most, of the first file that has readable ones.

        Damaged records are left out; they are named when they are read.
        """
        samples: list[Sample] = []
        for number, file in enumerate(self.files):
            offsets = self.get_offsets(number)[: count + 1]
            for begin, end in pairwise(offsets.tolist()):
                with suppress(ValueError, InputError):
                    samples.append(parse(file.read(begin, end)))
            if samples:
                break
        return samples

    def get_counts(self) -> list[int]:
        """Return the number of records of each file."""
        return [max(0, len(self.get_offsets(number)) - 1) for number in range(len(self.files))]


class RecordSource(FileRows):
    """A source that reads each record of its files by itself."""

    def __init__(
        self, files: list[DataFile], record_format: _RecordFormat, options: OpenOptions
    ) -> None:
        super().__init__(record_format.name, files, record_format.get_counts(), options)
        # How the format divides the files into records.
        self.records = record_format
        # The first record that can be read, and its values by column.
        self.first_index = self._find_readable()
        self.first = self._read_samples(self.first_index, None)[0]
        # The columns of a batch.
        self.names = select_columns(options.columns or (), self.first, files[0].name)
        self.name_set = frozenset(self.names)
        # The columns that are parsed; None for all.
        self.needed = None if options.columns is None else frozenset(self.names)

    @property
    def columns(self) -> dict[str, str]:
        """The name and the type of each column, as texts to print."""
        descriptions = {}
        for name in self.names:
            if self.decode is None:
                column = self._make_column(name, [self.first], self.first_index)
            else:  # which gets the values as they are
                value = self.first[name]
                column = value[np.newaxis] if isinstance(value, np.ndarray) else [value]
            descriptions[name] = _describe_column(column)
        return descriptions

    def read(self, indices: IndexArray) -> Any:
        """Return the batch of these samples: their columns, or what `decode` makes of them."""
        indices = np.asarray(indices)
        samples = self._read_samples(indices, self.needed)
        if self.decode is not None:
            return collate_decoded(samples, self.decode)
        for index, sample in zip(indices, samples, strict=True):
            if problem := self._find_name_problem(sample):
                file, row = self._find_record(index)
                hint = f"columns=, names that all records have, or {DECODE_HINT}"
                raise InputError(f"{file}: record {row} {problem}", hint)
        return self.make_batch(
            {name: self._make_column(name, samples, indices) for name in self.names}
        )

    def find_damage(self) -> Iterator[Damage]:
        """Read all records, and yield those that cannot be read."""
        for number in range(len(self.files)):
            yield from self.find_damage_in(number)

    def find_damage_in(self, number: int) -> Iterator[Damage]:
        """Read all records of one file, and yield those that cannot be read."""
        for row in range(self.count_rows(number)):
            try:
                sample = self._read_sample(number, row)
                if self.decode is None:
                    if problem := self._find_name_problem(sample):
                        raise ValueError(f"it {problem}")
                    for name in self.names:
                        self._stack(name, [sample])
            except ValueError as error:
                yield Damage(self.files[number].name, row, 1, str(error))
            except InputError as error:
                yield Damage(self.files[number].name, row, 1, error.problem)

    def _find_readable(self) -> IndexArray:
        """Return the first record that can be read, of the first MAX_FIRST_RECORDS; shape (1,).

        Raises:
            InputError: None of them can be read; it names the first one.
        """
        errors = []
        for index in range(min(len(self), MAX_FIRST_RECORDS)):
            number = np.array([index])
            try:
                self._read_samples(number, None)
            except InputError as error:
                errors.append(error)
            else:
                return number
        raise errors[0]

    def _read_samples(self, indices: IndexArray, names: frozenset[str] | None) -> list[Sample]:
        """Return the samples in the order of their indices, with at least these columns."""
        samples: list[Sample] = [{}] * len(indices)
        for number, positions, rows in self.locate(indices):
            offsets = self.records.get_offsets(number)
            begins = offsets[rows].tolist()
            parts = self.files[number].read_parts(begins, offsets[rows + 1].tolist())
            parsed: list[Sample] = []
            try:
                for data in parts:
                    parsed.append(self.records.parse(number, data, names))
            except (ValueError, InputError) as error:
                row = int(rows[len(parsed)])
                raise locate_error(self.files[number].name, row, error) from error
            for position, sample in zip(positions.tolist(), parsed, strict=True):
                samples[position] = sample
        return samples

    def _read_sample(self, number: int, row: int) -> Sample:
        """Return the record in a row of a file. Raises ValueError if it is damaged."""
        offsets = self.records.get_offsets(number)
        begin = int(offsets[row])
        data = self.files[number].read(begin, int(offsets[row + 1]))
        return self.records.parse(number, data, None)

    def _find_name_problem(self, sample: Sample) -> str:
        """Return how the columns of a sample are not those of the first, "" if they are."""
        if sample.keys() == self.name_set or (self.needed and self.needed <= sample.keys()):
            return ""
        missing = self.name_set - sample.keys()
        if missing:
            return f"has no {min(missing)}"
        return f"has {min(sample.keys() - self.name_set)}, and the first record has not"

    def _make_column(self, name: str, samples: list[Sample], indices: IndexArray) -> Any:
        """Return one column of samples. An error names a record that is the cause."""
        try:
            return self._stack(name, samples)
        except (ValueError, InputError):
            for index, sample in zip(indices, samples, strict=True):
                self._validate_value(name, sample, index)
            raise  # each value alone makes a column, and only together they do not

    def _validate_value(self, name: str, sample: Sample, index: np.int64) -> None:
        """Raise InputError, which names a record, if its value alone makes no column."""
        try:
            self._stack(name, [sample])
        except (ValueError, InputError) as error:
            raise locate_error(*self._find_record(index), error) from error

    def _stack(self, name: str, samples: list[Sample]) -> Any:
        """Return one column of samples."""
        values = [sample[name] for sample in samples]
        return self.records.make_column(name, values, self.first[name])

    def _find_record(self, index: np.int64) -> tuple[str, int]:
        """Return the file of a sample, and the number of its record there."""
        number, _, rows = next(self.locate(np.array([index])))
        return self.files[number].name, int(rows[0])


def _describe_column(column: Any) -> str:
    """Return the type of the values of a column, of one sample or more, as a text to print."""
    if isinstance(column, Ragged):
        return f"lists of {column.values.dtype}"
    if isinstance(column, np.ndarray):
        return f"{' x '.join(map(str, column.shape[1:]))} {column.dtype}".strip()
    return type(column[0]).__name__
