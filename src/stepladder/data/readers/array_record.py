"""ArrayRecord files, through their library: each record is bytes, which `decode` makes sense of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from stepladder.core.errors import InputError, get_reason
from stepladder.core.order import IndexArray
from stepladder.data.readers.batches import Sample, collate_decoded
from stepladder.data.readers.damage import DAMAGE_HINT, Damage
from stepladder.data.readers.file_rows import FileRows
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.open_options import OpenOptions

RECORD = "record"  # the only column
OPEN_RECORD_FILES = 32  # at once


class ArrayRecordSource(FileRows):
    """Records of ArrayRecord files."""

    def __init__(self, files: list[DataFile], options: OpenOptions) -> None:
        self.open_again = lru_cache(OPEN_RECORD_FILES)(lambda number: _open_reader(files[number]))
        counts = [self.open_again(number).num_records() for number in range(len(files))]
        super().__init__("array_record", files, counts, options)

    @property
    def columns(self) -> dict[str, str]:
        """The name and the type of each column, as texts to print."""
        return {RECORD: "bytes"}

    def read(self, indices: IndexArray) -> Any:
        """Return the batch of what `decode` makes of these records, or their bytes."""
        indices = np.asarray(indices)
        samples: list[Sample] = [{}] * len(indices)
        for number, places, rows in self.locate(indices):
            records = self._read_records(number, rows.tolist())
            for place, record in zip(places.tolist(), records, strict=True):
                samples[place] = {RECORD: record}
        if self.decode is not None:
            return collate_decoded(samples, self.decode)
        return self.make_batch({RECORD: [sample[RECORD] for sample in samples]})

    def find_damage(self) -> Iterator[Damage]:
        """Read all records, and yield those that cannot be read."""
        for number in range(self.num_files):
            for row in range(self.count_rows(number)):
                try:
                    self._read_records(number, [row])
                except InputError as error:
                    yield Damage(self.files[number].name, row, 1, error.problem)

    def _read_records(self, number: int, rows: list[int]) -> list[bytes]:
        try:
            records: list[bytes] = self.open_again(number).read(rows)
        except (ValueError, IndexError, RuntimeError, OSError) as error:
            reason = get_reason(error)
            raise Damage(self.files[number].name, rows[0], len(rows), reason).as_error() from error
        return records


def _open_reader(file: DataFile) -> Any:
    """Return the library's reader of a file.

    Raises:
        InputError: The library is not installed, or the file is damaged.
    """
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        problem = f"{file.name} needs array_record"
        raise InputError(problem, "pip install array-record") from error
    try:
        return ArrayRecordReader(str(file.get_path()))
    except (ValueError, RuntimeError, OSError) as error:
        problem = f"{file.name} cannot be used: {get_reason(error)}"
        raise InputError(problem, DAMAGE_HINT) from error
