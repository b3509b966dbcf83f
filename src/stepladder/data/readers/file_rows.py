"""Which row of which file a sample is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.order import IndexArray
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.open_options import OpenOptions

CHUNK_BYTES = 1 << 20  # of rows that are read together: a block of the cache


class FileRows:
    """The samples of a source: the rows of its files, one file after the other."""

    # The name of the format.
    format: str

    def __init__(
        self,
        files: list[DataFile],
        counts: list[int],
        options: OpenOptions,
    ) -> None:
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
        self.files = files
        self.options = options
        # The first sample of each file, and the number of samples.
        self.starts: IndexArray = np.cumsum([0, *counts])
        rows = options.chunk_rows or max(1, CHUNK_BYTES * total // max(1, self.num_bytes))
        edges = []
        first = 0
        for count in counts:
            edges.append(
                np.arange(
                    first,
                    first + count,
                    rows,
                    dtype=np.int64,
                )
            )
            first += count
        # The first sample of each chunk, and the number of samples.
        self.edges: IndexArray = np.concatenate([*edges, np.array([total], np.int64)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def chunk_edges(self) -> IndexArray:
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
        """A text that is another one when the samples are; None if `decode` may change unseen."""
        return self.options.make_fingerprint(self.format, self.files)

    def count_rows(self, number: int) -> int:
        """Return the number of rows of a file."""
        return int(self.starts[number + 1] - self.starts[number])

    def locate(self, indices: IndexArray) -> Iterator[tuple[int, IndexArray, IndexArray]]:
        """Yield for each file with some of the samples: its number, their places, their rows."""
        numbers = self.starts.searchsorted(indices, "right") - 1
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            yield number, places, indices[places] - self.starts[number]
