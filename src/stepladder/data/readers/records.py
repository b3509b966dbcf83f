"""A source over records: ranges of bytes in files, each of which is one sample."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.order import IndexArray
from stepladder.data.readers.batches import (
    DECODE_HINT,
    Sample,
    collate_decoded,
    join_lists,
    stack_values,
)
from stepladder.data.readers.damage import Damage
from stepladder.data.readers.file_rows import FileRows
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.record_index import FindOffsets, load_index
from stepladder.data.table import select_columns

OPEN_INDEXES = 64  # at once


class RecordFormat(Protocol):
    """How a format divides its files into records.

    Attributes:
        name: The name of the format.
        ragged: The columns whose arrays differ in length.
    """

    name: str
    ragged: frozenset[str]

    def get_offsets(self, number: int) -> IndexArray:
        """Return where the records of a file begin, and where the last one ends."""
        ...

    def get_counts(self) -> list[int]:
        """Return the number of records of each file."""
        ...

    def parse(
        self,
        number: int,
        data: bytes,
        names: frozenset[str] | None,
    ) -> Sample:
        """Return the values of a record of a file by column, at least of these columns.

        Raises:
            ValueError: It is damaged.
        """
        ...


class IndexedFiles:
    """The offsets of files whose records are found by an index.

    Attributes:
        files: The files.
    """

    def __init__(
        self,
        files: list[DataFile],
        find_offsets: FindOffsets,
        options: OpenOptions,
    ) -> None:
        self.files = files
        self.find_offsets = find_offsets
        self.beside = options.index_beside
        self.get_offsets = lru_cache(OPEN_INDEXES)(self._load)

    def _load(self, number: int) -> IndexArray:
        return load_index(self.files[number], self.find_offsets, self.beside)

    def get_counts(self) -> list[int]:
        """Return the number of records of each file."""
        return [max(0, len(self.get_offsets(number)) - 1) for number in range(len(self.files))]


class RecordSource(FileRows):
    """Records of files, each read by itself."""

    def __init__(
        self,
        files: list[DataFile],
        record_format: RecordFormat,
        options: OpenOptions,
    ) -> None:
        super().__init__(files, record_format.get_counts(), options.chunk_rows)
        self.format = record_format.name
        self.records = record_format
        self.decode = options.decode
        self.first = self._read_samples(np.zeros(1, np.int64), None)[0]
        self.as_list = options.columns is not None
        self.names = select_columns(options.columns or (), self.first, files[0].name)
        self.needed = None if options.columns is None else frozenset(self.names)

    @property
    def columns(self) -> dict[str, str]:
        """The columns and their types, for people."""
        return {name: describe_value(self.first[name]) for name in self.names}

    def read(self, indices: IndexArray) -> Any:
        """Return the batch of these records: by column, or of what `decode` makes of them."""
        indices = np.asarray(indices)
        samples = self._read_samples(indices, self.needed)
        if self.decode is not None:
            return collate_decoded(samples, self.decode)
        columns = {name: self._make_column(name, samples, indices) for name in self.names}
        return list(columns.values()) if self.as_list else columns

    def find_damage(self) -> Iterator[Damage]:
        """Read all records, and yield those that cannot be read."""
        for number in range(len(self.files)):
            yield from self.find_damage_in(number)

    def find_damage_in(self, number: int) -> Iterator[Damage]:
        """Read all records of one file, and yield those that cannot be read."""
        for row in range(self.count_rows(number)):
            try:
                self._read_sample(number, row, None)
            except ValueError as error:
                yield Damage(
                    self.files[number].name,
                    row,
                    1,
                    str(error),
                )

    def _read_samples(
        self,
        indices: IndexArray,
        names: frozenset[str] | None,
    ) -> list[Sample]:
        samples: list[Sample] = [{}] * len(indices)
        for number, places, rows in self.locate(indices):
            offsets = self.records.get_offsets(number)
            begins = offsets[rows].tolist()
            ends = offsets[rows + 1].tolist()
            self.files[number].prepare(begins, ends)
            read = self.files[number].read
            parse = self.records.parse
            for place, begin, end, row in zip(places.tolist(), begins, ends, rows, strict=True):
                try:
                    samples[place] = parse(number, read(begin, end), names)
                except ValueError as error:
                    damage = Damage(
                        self.files[number].name,
                        int(row),
                        1,
                        str(error),
                    )
                    raise damage.as_error() from error
        return samples

    def _read_sample(
        self,
        number: int,
        row: int,
        names: frozenset[str] | None,
    ) -> Sample:
        """Return one record. Raises ValueError if it is damaged."""
        offsets = self.records.get_offsets(number)
        begin = int(offsets[row])
        data = self.files[number].read(begin, int(offsets[row + 1]))
        return self.records.parse(number, data, names)

    def _make_column(
        self,
        name: str,
        samples: list[Sample],
        indices: IndexArray,
    ) -> Any:
        try:
            values = [sample[name] for sample in samples]
        except KeyError:
            lacking = next(place for place, sample in enumerate(samples) if name not in sample)
            number, _, row = next(self.locate(indices[lacking : lacking + 1]))
            problem = f"{self.files[number].name}: record {row[0]} has no {name}"
            raise InputError(problem, f"columns= without it, or {DECODE_HINT}") from None
        return join_lists(values) if name in self.records.ragged else stack_values(name, values)


def describe_value(value: Any) -> str:
    """Return the type of a value, for people."""
    if isinstance(value, np.ndarray):
        return f"{' x '.join(map(str, value.shape))} {value.dtype}"
    return type(value).__name__
