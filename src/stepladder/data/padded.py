"""`Padded`: documents as rows of one width, whose batches hold similar lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.numbers import MAX_INTEGER
from stepladder.core.order import IndexArray
from stepladder.data.documents import SOURCE_HINT, Documents, split_documents
from stepladder.data.source import CHUNKS_IN_MEMORY, Source, get_contents
from stepladder.data.table import Ragged

PADDING_HINT = "padding=0, or another number of the type of the documents"


class Padded:
    """A source of documents, each batch of which is padded to its longest document.

    Batches hold documents of similar lengths: the plan sorts the samples of up to 50 neighbouring
    steps by length, cuts them into batches, and shuffles these. Every epoch has other batches, and
    each document is in one of them, on any number of ranks. Documents of a source with chunks stay
    with those of neighbouring chunks.

    A batch of documents that are arrays is a dict with `tokens`, shape (n, longest), and `lengths`,
    the number of tokens of each document, by which losses and attention are masked. A batch of a
    source with columns has the same columns, of which those of lists become such arrays, and
    `lengths` as a further one.

    Args:
        documents: A sequence of 1-dimensional arrays of tokens, or a `Source` whose `read` returns
            a list of them, or columns. The first column of lists has the documents.
        lengths: The tokens of each document. By default they are counted, by reading all.
        padding: What stands behind a document.

    Raises:
        InputError: The lengths are not those of the documents, or there is no column of lists.
    """

    sorted_by_length = True  # the samples of each chunk, or all without chunks

    def __init__(
        self,
        documents: Source | Sequence[Any],
        lengths: Sequence[int] | IndexArray | None = None,
        *,
        padding: float = 0,
    ) -> None:
        self._documents = Documents(documents)
        if not isinstance(padding, Real):
            raise InputError(f"padding={padding!r:.60}", PADDING_HINT)
        self._padding: float = padding
        counts = self._documents.get_lengths(lengths)
        edges = [0, len(counts)]
        if self._documents.chunks is not None:
            edges = self._documents.chunks.edges.tolist()
        parts = [lo + np.argsort(counts[lo:hi], kind="stable") for lo, hi in pairwise(edges)]
        self._numbers: IndexArray = np.concatenate(parts)  # of the documents, by sample

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._numbers)

    @property
    def contents(self) -> list[list[str]] | None:
        """The name and a hash of each file of the documents."""
        return get_contents(self._documents.data)

    @property
    def chunk_edges(self) -> IndexArray | None:
        """The chunks of the documents, if they have any."""
        chunks = self._documents.chunks
        return None if chunks is None else chunks.edges

    @property
    def chunks_in_memory(self) -> int:
        """How many chunks the documents' source keeps in memory."""
        return getattr(self._documents.data, "chunks_in_memory", CHUNKS_IN_MEMORY)

    def read(self, indices: IndexArray) -> Any:
        """Return these documents, as wide as the longest of them."""
        batch, documents, lengths = self._documents.read(self._numbers[indices])
        if isinstance(batch, dict):
            padded = {name: self._pad(column) for name, column in batch.items()}
            return {**padded, "lengths": lengths}
        if documents is batch:
            return {"tokens": self._pad(_join_documents(documents)), "lengths": lengths}
        return [*map(self._pad, batch), lengths]

    def _pad(self, column: Any) -> Any:
        """Return a column of lists as an array, and any other column as it is."""
        if not isinstance(column, Ragged):
            return column
        values = np.asarray(column.values)
        offsets = np.asarray(column.offsets)
        lengths = np.diff(offsets)
        # torch has few operations for whole numbers of other types.
        dtype = np.int64 if values.dtype.kind in "iu" else values.dtype
        padding = self._padding
        is_whole = abs(padding) < MAX_INTEGER and float(padding).is_integer()
        if dtype == np.int64 and not is_whole:
            raise InputError(f"padding={padding} of documents of whole numbers", PADDING_HINT)
        padded = np.full((len(lengths), lengths.max()), padding, dtype)
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = values[offsets[0] : offsets[-1]]
        return padded


def _join_documents(documents: Any) -> Ragged:
    """Return documents one after the other.

    Raises:
        InputError: One of them is no array of numbers of one axis.
    """
    if isinstance(documents, Ragged):
        return documents
    arrays = [np.asarray(document) for document in split_documents(documents)]
    for array in arrays:
        if array.ndim != 1:
            raise InputError(f"a document has the shape {list(array.shape)}", SOURCE_HINT)
    # NumPy takes an empty list for one of float64.
    filled = [array for array in arrays if len(array)]
    if not filled:
        filled = [np.empty(0, np.int64)]
    values = np.concatenate(filled)
    if values.dtype.kind not in "biuf":
        raise InputError(f"a document holds {values.dtype}", SOURCE_HINT)
    return Ragged(values, np.cumsum([0, *map(len, arrays)]))
