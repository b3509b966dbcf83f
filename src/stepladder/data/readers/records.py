"""A source whose samples are records: each is a range of bytes in a file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.order import IndexArray
from stepladder.data.local_files import make_change_error
from stepladder.data.readers.batches import COLUMN_HINT, DECODE_HINT, Sample, stack_values
from stepladder.data.readers.damage import Damage, describe_error, locate_error
from stepladder.data.readers.file_rows import FileRows
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.record_index import load_index
from stepladder.data.table import find_column, select_columns

MAX_FIRST_RECORDS = 16  # of which one shows the columns; the others may be damaged
OPEN_INDEXES = 64  # the most files whose offsets are kept in memory


class RecordSource(FileRows):
    """A source that reads each record of its files by itself.

    A subclass is a format: it says where records are, and what they mean. The `number` of a file is
    its index in the list of files.
    """

    def __init__(self, files: list[DataFile], counts: list[int], options: OpenOptions) -> None:
        super().__init__(files, counts, options)
        # The first record that can be read, and its values by column.
        self.first_index, self.first = self._find_readable()
        # The columns of a batch.
        self.names = select_columns(options.columns or (), self.first, files[0].name)
        self.name_set = frozenset(self.names)
        # The columns that are parsed; None for all.
        self.needed = None if options.columns is None else frozenset(self.names)

    @cached_property
    def get_offsets(self) -> Callable[[int], IndexArray]:
        """Returns what `load_offsets` does, which some files have in memory."""
        return lru_cache(OPEN_INDEXES)(self.load_offsets)

    @abstractmethod
    def load_offsets(self, number: int) -> IndexArray:
        """Return where the records of a file begin, and where the last one ends."""

    @abstractmethod
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
        return stack_values(name, values, first)

    def read_records(self, number: int, rows: IndexArray) -> list[bytes]:
        """Return the bytes of the records in these rows of a file."""
        offsets = self.get_offsets(number)
        return self.files[number].read_parts(offsets[rows].tolist(), offsets[rows + 1].tolist())

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
            descriptions[name] = str(find_column(column) or type(column[0]).__name__)
        return descriptions

    def read_samples(self, indices: IndexArray) -> list[Sample]:
        """Return the records in the order of their indices, with at least the named columns."""
        return self._parse_records(indices, self.needed)

    def read_columns(self, indices: IndexArray) -> dict[str, Any]:
        """Return the columns of these records."""
        samples = self.read_samples(indices)
        for index, sample in zip(indices, samples, strict=True):
            if problem := self._find_name_problem(sample):
                file, row = self.find_record(index)
                hint = f"columns=, names that all records have, or {DECODE_HINT}"
                raise InputError(f"{file}: record {row} {problem}", hint)
        return {name: self._make_column(name, samples, indices) for name in self.names}

    def find_file_problem(self, number: int) -> str:
        """Return why none of the records of a file can be read, or ""."""
        return ""

    def find_damage(self) -> Iterator[Damage]:
        """Read all records, and yield those that cannot be read."""
        for number, file in enumerate(self.files):
            rows = self.count_rows(number)
            if problem := self.find_file_problem(number):
                yield Damage(file.name, 0, rows, problem)
                continue
            for row in range(rows):
                try:
                    self._validate_record(number, row)
                except (ValueError, InputError) as error:
                    yield describe_error(file.name, row, error)

    def _validate_record(self, number: int, row: int) -> None:
        """Raise ValueError or InputError if a record of a file cannot be read."""
        (data,) = self.read_records(number, np.array([row]))
        sample = self.parse(number, data, None)
        if self.decode is not None:
            return
        if problem := self._find_name_problem(sample):
            raise ValueError(f"it {problem}")
        for name in self.names:
            self._stack(name, [sample])

    def _find_readable(self) -> tuple[IndexArray, Sample]:
        """Return the first record that can be read, of the first MAX_FIRST_RECORDS; shape (1,).

        Raises:
            InputError: None of them can be read; it names the first one.
        """
        errors = []
        for index in range(min(len(self), MAX_FIRST_RECORDS)):
            number = np.array([index])
            try:
                return number, self._parse_records(number, None)[0]
            except InputError as error:
                errors.append(error)
        raise errors[0]

    def _parse_records(self, indices: IndexArray, names: frozenset[str] | None) -> list[Sample]:
        """Return the samples in the order of their indices, with at least these columns."""
        samples: list[Sample] = [{}] * len(indices)
        for number, positions, rows in self.locate(indices):
            parsed: list[Sample] = []
            records = self.read_records(number, rows)
            try:
                for data in records:
                    parsed.append(self.parse(number, data, names))
            except (ValueError, InputError) as error:
                row = int(rows[len(parsed)])
                raise locate_error(self.files[number].name, row, error) from error
            for position, sample in zip(positions.tolist(), parsed, strict=True):
                samples[position] = sample
        return samples

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
            hint = f"correct the file; or {COLUMN_HINT}"
            raise locate_error(*self.find_record(index), error, hint) from error

    def _stack(self, name: str, samples: list[Sample]) -> Any:
        """Return one column of samples."""
        values = [sample[name] for sample in samples]
        return self.make_column(name, values, self.first[name])

    def find_record(self, index: int | np.int64) -> tuple[str, int]:
        """Return the file of a sample, and the number of its record there."""
        number, _, rows = next(self.locate(np.array([index])))
        return self.files[number].name, int(rows[0])


class IndexedSource(RecordSource):
    """Records of a format that needs an index of where they are in each file."""

    def __init__(self, files: list[DataFile], options: OpenOptions) -> None:
        self.files = files
        # Whether an index is written beside its file, not into the cache.
        self.writes_beside_files = options.index_beside
        # The length of the offsets of each file that was read before, by its number.
        self.lengths: dict[int, int] = {}
        counts = [max(0, len(self.get_offsets(number)) - 1) for number in range(len(files))]
        super().__init__(files, counts, options)

    @abstractmethod
    def find_offsets(self, file: DataFile) -> Iterator[IndexArray]:
        """Yield the offsets of a file in parts, to make its index."""

    def get_index_kind(self, file: DataFile) -> str:
        """Return what an index of a file depends on besides the file."""
        return self.format

    def load_offsets(self, number: int) -> IndexArray:
        """Return where the records of a file begin, and where the last one ends."""
        file = self.files[number]
        kind = self.get_index_kind(file)
        offsets = load_index(file, self.find_offsets, kind, self.writes_beside_files)
        # The cache of `get_offsets` drops some offsets, and these are loaded once more.
        expected_length = self.lengths.setdefault(number, len(offsets))
        if len(offsets) != expected_length:
            raise make_change_error(file.name)
        return offsets

    def parse_first(self, count: int) -> dict[int, Sample]:
        """Return the first records, `count` at most, of the first file that has readable ones.

        Damaged records are left out; they are named when they are read.

        Returns:
            The records by the number of the sample.
        """
        samples: dict[int, Sample] = {}
        for number, file in enumerate(self.files):
            offsets = self.get_offsets(number)[: count + 1]
            for index, (begin, end) in enumerate(pairwise(offsets.tolist()), self.starts[number]):
                with suppress(ValueError, InputError):
                    samples[index] = self.parse(number, file.read(begin, end), None)
            if samples:
                break
        return samples
