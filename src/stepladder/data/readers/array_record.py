"""ArrayRecord files, through their library: each record is bytes, which `decode` makes sense of."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from stepladder.core.errors import InputError, as_input_error, get_reason
from stepladder.core.order import IndexArray
from stepladder.data.readers.batches import Sample
from stepladder.data.readers.damage import DAMAGE_HINT, Damage
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.records import RecordSource

RECORD = "record"  # the only column
OPEN_RECORD_FILES = 32  # at once


class ArrayRecordSource(RecordSource):
    """Records of ArrayRecord files."""

    format = "array_record"

    def __init__(self, files: list[DataFile], options: OpenOptions) -> None:
        self.open_again = lru_cache(OPEN_RECORD_FILES)(lambda number: _open_reader(files[number]))
        counts = [self.open_again(number).num_records() for number in range(len(files))]
        super().__init__(files, counts, options)

    def read_records(self, number: int, rows: IndexArray) -> list[bytes]:
        """Return the bytes of the records in these rows of a file."""
        try:
            records: list[bytes] = self.open_again(number).read(rows.tolist())
        except (ValueError, IndexError, RuntimeError, OSError) as error:
            reason = get_reason(error)
            damage = Damage(self.files[number].name, int(rows[0]), len(rows), reason)
            raise damage.as_error() from error
        return records

    def parse(self, number: int, data: bytes, names: frozenset[str] | None) -> Sample:
        """Return the bytes of a record as its only column."""
        return {RECORD: data}


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
    errors = (ValueError, RuntimeError, OSError)
    with as_input_error(f"{file.name} cannot be used", DAMAGE_HINT, errors):
        return ArrayRecordReader(str(file.get_path()))
