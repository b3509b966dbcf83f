"""Which row of which file a sample is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import compress, pairwise
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.order import IndexArray
from stepladder.data.readers.batches import Sample, collate_decoded
from stepladder.data.readers.damage import Damage
from stepladder.data.readers.files import Contents, DataFile, hash_files, validate_no_copies
from stepladder.data.readers.open_options import OpenOptions

CHUNK_BYTES = 1 << 20  # of rows that are read together: a block of the cache


class OpenedSource(ABC):
    """A source that `open_data` returns: samples in files, in chunks that are read together.

    A subclass reads samples by column.
    """

    # The name of the format.
    format: str

    def __init__(self, files: Sequence[DataFile], edges: IndexArray, options: OpenOptions) -> None:
        """Set up the source.

        Args:
            files: The files.
            edges: The first sample of each chunk, and the number of samples.
            options: What the caller of `open_data` has set.
        """
        self.files = files
        self.edges = edges
        self.options = options
        # The user's function that makes a sample of a row or record; None if there is none.
        self.decode = options.decode
        # Whether a batch is a list of columns instead of a dict.
        self.as_list = options.columns is not None

    def __len__(self) -> int:
        return int(self.edges[-1])

    @property
    def chunk_edges(self) -> IndexArray | None:
        """The first sample of each chunk, and the number of samples."""
        return self.edges

    @property
    def num_files(self) -> int:
        """The number of files."""
        return len(self.files)

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def fingerprint(self) -> str | None:
        """A text that is another one when the samples are; None with `decode`."""
        return self.options.make_fingerprint(self.format, self.files)

    @cached_property
    def contents(self) -> Contents:
        """The name of each file, and a hash of samples of it."""
        return hash_files(self.files)

    @property
    @abstractmethod
    def columns(self) -> dict[str, str]:
        """The name and the type of each column, as texts to print."""

    @abstractmethod
    def find_damage(self) -> Iterator[Damage]:
        """Read all samples, and yield those that cannot be read."""

    def read(self, indices: IndexArray) -> Any:
        """Return the batch of these samples: by column, or of what `decode` makes of them."""
        indices = np.asarray(indices)
        if self.decode is not None:
            return collate_decoded(self.read_samples(indices), self.decode)
        columns = self.read_columns(indices)
        return list(columns.values()) if self.as_list else columns

    def read_samples(self, indices: IndexArray) -> list[Sample]:
        """Return each of these samples as `decode` gets it."""
        columns = self.read_columns(indices)
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    @abstractmethod
    def read_columns(self, indices: IndexArray) -> dict[str, Any]:
        """Return these samples by column, as a batch has them."""


class FileRows(OpenedSource):
    """The samples of a source: the rows of its files, one file after the other."""

    def __init__(self, files: list[DataFile], counts: list[int], options: OpenOptions) -> None:
        """Divide the samples into chunks, which end with files.

        Args:
            files: The files.
            counts: The number of rows of each file.
            options: What the caller of `open_data` has set. Without the rows of a chunk it has
                about CHUNK_BYTES.

        Raises:
            InputError: There are no rows.
        """
        total = sum(counts)
        if total == 0:
            raise InputError(f"{files[0].name} has no samples", "a file with some")
        validate_no_copies(list(compress(files, counts)))
        # The first sample of each file, and the number of samples.
        self.starts: IndexArray = np.cumsum([0, *counts])
        num_bytes = sum(file.size for file in files)
        rows = options.chunk_rows or max(1, CHUNK_BYTES * total // max(1, num_bytes))
        edges = [np.arange(lo, hi, rows) for lo, hi in pairwise(self.starts.tolist())]
        super().__init__(files, np.concatenate([*edges, [total]]), options)

    def count_rows(self, number: int) -> int:
        """Return the number of rows of a file."""
        return int(self.starts[number + 1] - self.starts[number])

    def locate(self, indices: IndexArray) -> Iterator[tuple[int, IndexArray, IndexArray]]:
        """Yield for each file with some of the samples: its number, their places, their rows."""
        return group_rows(self.starts, indices)


def group_rows(
    starts: IndexArray, indices: IndexArray
) -> Iterator[tuple[int, IndexArray, IndexArray]]:
    """Yield for each part with some of the samples: its number, their places, their rows.

    Args:
        starts: The first sample of each part, and the number of samples.
        indices: The samples.
    """
    numbers = starts.searchsorted(indices, "right") - 1
    for number in np.unique(numbers).tolist():
        places = np.flatnonzero(numbers == number)
        yield number, places, indices[places] - starts[number]
