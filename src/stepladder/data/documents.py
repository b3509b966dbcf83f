"""Documents of tokens: a sequence of them, or a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.order import Chunks, IndexArray
from stepladder.data.source import is_source, make_chunks
from stepladder.data.table import Ragged, split_lists

DOCUMENTS_PER_READ = 4096
LENGTHS_HINT = "lengths=None, or a number of tokens for each document, 0 or more"
SOURCE_HINT = (
    "a sequence of arrays of tokens, or a source whose read returns a list of them, or columns of"
    " which one is of lists"
)


class Documents:
    """Documents that are read by number.

    Args:
        data: A sequence of arrays of tokens, or a source of documents.

    Raises:
        InputError: It is neither.
    """

    def __init__(self, data: Any) -> None:
        is_sequence = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        has_items = is_sequence and not isinstance(data, (dict, type))
        if not has_items and not is_source(data):
            raise InputError(f"the documents are a {type(data).__name__}", SOURCE_HINT)
        self.data = data
        # The chunks of a source, or None.
        self.chunks: Chunks | None = make_chunks(self.data) if is_source(data) else None

    def __len__(self) -> int:
        return len(self.data)

    def read(self, numbers: IndexArray) -> tuple[Any, Any, IndexArray]:
        """Read documents.

        Returns:
            The batch as the source gives it, a list of a sequence's; its documents; their lengths.

        Raises:
            InputError: The batch has no documents, or not one for each number.
        """
        if is_source(self.data):
            batch = self.data.read(numbers)
        else:
            batch = [self.data[number] for number in numbers.tolist()]
        documents = _find_documents(batch)
        lengths = _count_tokens(documents)
        if len(lengths) != len(numbers):
            raise InputError(f"of {len(numbers)} documents, {len(lengths)} are read", SOURCE_HINT)
        return batch, documents, lengths

    def get_lengths(self, lengths: Sequence[int] | IndexArray | None) -> IndexArray:
        """Return the number of tokens of each document.

        Args:
            lengths: These numbers, as the caller knows them; None to read and count all.

        Raises:
            InputError: They are not one for each document or negative, or a batch has no documents.
        """
        count = len(self)
        if lengths is None:
            starts = range(0, count, DOCUMENTS_PER_READ)
            spans = [np.arange(lo, min(lo + DOCUMENTS_PER_READ, count)) for lo in starts]
            parts = [self.read(span)[2] for span in spans]
            return np.concatenate([np.empty(0, np.int64), *parts])
        with as_input_error("lengths", LENGTHS_HINT, (TypeError, ValueError)):
            counts = np.asarray(lengths)
        if counts.shape != (count,):
            raise InputError(
                f"lengths has {counts.size} numbers, and there are {count} documents", LENGTHS_HINT
            )
        if count and counts.dtype.kind not in "iu":
            raise InputError(f"lengths holds {counts.dtype}, not whole numbers", LENGTHS_HINT)
        if count and counts.min() < 0:
            raise InputError(f"a document has the length {counts.min()}", LENGTHS_HINT)
        return counts.astype(np.int64)


def _find_documents(batch: Any) -> Any:
    """Return the documents of a batch: of columns the first one of lists of numbers.

    Raises:
        InputError: The batch is a dict of other columns, or a list of texts or dicts.
    """
    if isinstance(batch, Ragged):
        return batch
    columns = batch.values() if isinstance(batch, dict) else batch
    documents = next((column for column in columns if isinstance(column, Ragged)), None)
    if documents is not None:
        return documents
    if isinstance(batch, dict):
        raise InputError(
            f"the documents have the columns {', '.join(batch)}, and none of lists of numbers",
            "a source with a column of tokens",
        )
    if any(isinstance(document, (str, bytes)) for document in batch):
        raise InputError("the documents are texts", "the numbers that a tokenizer makes of them")
    if any(isinstance(document, dict) for document in batch):
        raise InputError("the documents are dicts", "the tokens of each, as an array or a list")
    return batch


def _count_tokens(documents: Any) -> IndexArray:
    """Return the length of each document of a batch.

    Raises:
        InputError: One of them has none.
    """
    if isinstance(documents, Ragged):
        return np.diff(np.asarray(documents.offsets))
    with as_input_error("the documents are no arrays", SOURCE_HINT, (TypeError,)):
        return np.array(list(map(len, documents)), np.int64)


def split_documents(documents: Any) -> list[Any]:
    """Return the documents of a batch as a list."""
    return split_lists(documents) if isinstance(documents, Ragged) else list(documents)
