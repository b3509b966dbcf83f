"""`Filtered` and `Mapped`: some samples of a source, and what a function makes of its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from stepladder.core.console import tell_if_slow
from stepladder.core.errors import InputError
from stepladder.core.order import IndexArray
from stepladder.data.readers.record_index import make_index
from stepladder.data.source import (
    CHUNKS_IN_MEMORY,
    FUNCTION_OF,
    Source,
    get_contents,
    is_source,
    make_chunks,
)

SAMPLES_PER_READ = 4096


class _DerivedSource:
    """A source that is made of another one by a function.

    Args:
        source: The other source.
        function: The function.
        key: What the user calls what the function does; None for no name.
    """

    def __init__(
        self, source: Source, function: Callable[[Any], Any], *, key: str | None = None
    ) -> None:
        if not is_source(source):
            raise InputError(
                f"the source of {type(self).__name__} is a {type(source).__name__}",
                "an object with __len__, chunk_edges and read(indices), such as open_data returns",
            )
        if not callable(function):
            raise InputError(
                f"the function of {type(self).__name__} is a {type(function).__name__}",
                "a function of a batch, as the source's read returns it",
            )
        self.source = source
        self.function = function
        self.key = key

    @property
    def chunks_in_memory(self) -> int:
        """How many chunks the source keeps in memory."""
        return getattr(self.source, "chunks_in_memory", CHUNKS_IN_MEMORY)

    @property
    def sorted_by_length(self) -> bool:
        """Whether the samples are in the order of their lengths, as those of `Padded` are."""
        return getattr(self.source, "sorted_by_length", False)

    @property
    def contents(self) -> list[list[str]]:
        """The name and a hash of each file of the source, and the key of the function."""
        of_function = [FUNCTION_OF + type(self).__name__, self.key or ""]
        return [*(get_contents(self.source) or ()), of_function]

    @property
    def fingerprint(self) -> str | None:
        """A text that is another one when the samples are; None if nothing tells."""
        of_source = getattr(self.source, "fingerprint", None)
        if of_source is None or not self.key:
            return None
        return f"{of_source} {type(self).__name__} {self.key}"


class Mapped(_DerivedSource):
    """A source whose batches are those of another one, as a function returns them.

    Args:
        source: The other source.
        function: Gets a batch as the source's `read` returns it, and returns the batch that is
            read. What it makes of a sample must not depend on the other samples of the batch, nor
            on random numbers.
        key: A text that is another one whenever the function does something else. Without it a run
            is not resumed.

    Raises:
        InputError: The other source is none.
    """

    def __init__(
        self, source: Source, function: Callable[[Any], Any], *, key: str | None = None
    ) -> None:
        super().__init__(source, function, key=key)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.source)

    @property
    def chunk_edges(self) -> Any:
        """The chunks of the other source."""
        return self.source.chunk_edges

    def read(self, indices: IndexArray) -> Any:
        """Return what the function makes of the batch of these samples."""
        return self.function(self.source.read(indices))


class Filtered(_DerivedSource):
    """A source of those samples of another one that a function keeps.

    Which these are is found by reading all samples. With a key it is found once, and kept in the
    user's cache as an index of 8 bytes a sample, where the other source can tell whether its
    samples have changed: one of `open_data` without `decode` can, by the names, sizes and times of
    its files. Of several processes on a machine one reads, and the others wait.

    Args:
        source: The other source.
        keep: Gets a batch as the source's `read` returns it, and returns True or False for each
            sample, shape (n,). It must not depend on the other samples of the batch.
        key: A text that is another one whenever `keep` keeps other samples. Without it a run is not
            resumed.

    Raises:
        InputError: The other source is none, no sample is kept, or `keep` returns something else.
    """

    def __init__(
        self, source: Source, keep: Callable[[Any], Any], *, key: str | None = None
    ) -> None:
        super().__init__(source, keep, key=key)
        self._kept = self._load_kept()
        if not len(self._kept):
            raise InputError(
                f"Filtered keeps none of {len(source)} samples",
                "a function that returns True for some",
            )

    def _load_kept(self) -> IndexArray:
        count = len(self.source)
        message = f"Filtered reads all {count:,} samples to find those that are kept"
        identity = self.fingerprint
        if identity is None:
            with tell_if_slow(message):
                return np.concatenate(list(self._find_kept()))
        return make_index(identity, count, self._find_kept, message)

    def _find_kept(self) -> Iterator[IndexArray]:
        """Read all samples, and yield those that are kept."""
        count = len(self.source)
        yield np.empty(0, np.int64)
        for lo in range(0, count, SAMPLES_PER_READ):
            indices = np.arange(lo, min(lo + SAMPLES_PER_READ, count))
            mask = np.asarray(self._call(self.source.read(indices)))
            if mask.dtype != np.bool_ or mask.shape != indices.shape:
                raise InputError(
                    f"the function of Filtered returns {mask.dtype} of shape {list(mask.shape)} for"
                    f" {len(indices)} samples",
                    "True or False for each sample",
                )
            yield indices[mask]

    def _call(self, batch: Any) -> Any:
        try:
            return self.function(batch)
        except OSError as error:  # which would be taken for one of the index file
            problem = f"the function of Filtered has raised {type(error).__name__}: {error}"
            raise RuntimeError(problem) from error

    def __len__(self) -> int:
        """Return the number of samples that are kept."""
        return len(self._kept)

    @property
    def chunk_edges(self) -> IndexArray | None:
        """The chunks of the other source, without those of which no sample is kept."""
        chunks = make_chunks(self.source)
        if chunks is None:
            return None
        return np.unique(np.searchsorted(self._kept, chunks.edges))

    def read(self, indices: IndexArray) -> Any:
        """Return the batch of these samples."""
        return self.source.read(self._kept[indices])
