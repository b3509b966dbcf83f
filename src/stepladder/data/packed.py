"""`Packed`: documents of tokens as a source of full blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.numbers import validate_count
from stepladder.data.documents import LENGTHS_HINT, SOURCE_HINT, Documents, split_documents
from stepladder.data.packing import Integers, concatenate_pieces, pack
from stepladder.data.source import Source, get_contents

IGNORED = -100  # what torch's cross_entropy leaves out
MIN_BLOCKS_PER_GROUP = 64  # of chunks that are packed together: at most 1 in 64 blocks is not full


class Packed:
    """A source of blocks of `block_size` tokens, each filled with documents.

    Every document is in one block, or, if it is longer than a block, in several. Which documents
    share a block follows from their lengths alone; the plan shuffles the blocks. Documents of a
    source with chunks share blocks with documents of neighbouring chunks only, so that reading
    stays chunk by chunk.

    A batch is a dict of arrays of shape (n, block_size):

    - `tokens`: the documents one after the other, then 0.
    - `targets`: the token that follows in the same document; -100 at its end and where no document
      is, which `cross_entropy` leaves out.
    - `positions`: the place of each token in its piece of a document, from 0. It restarts with each
      document, by which attention kernels for packed sequences know the boundaries.
    - `documents`: the number of the document within the block, from 1; 0 where none is. Attention
      and losses are masked by it.

    Args:
        documents: A sequence of 1-dimensional arrays of tokens, or a `Source` whose `read` returns
            a list of them, or a dict whose first column of lists they are.
        block_size: The tokens of a block.
        lengths: The tokens of each document. By default they are counted, by reading all.

    Raises:
        InputError: The lengths are not those of the documents, or there is no token.
    """

    def __init__(
        self,
        documents: Source | Sequence[Any],
        block_size: int,
        lengths: Sequence[int] | Integers | None = None,
    ) -> None:
        validate_count("block_size", block_size)
        self.block_size = block_size
        self._documents = Documents(documents)
        counts = self._documents.get_lengths(lengths)
        if not counts.any():
            raise InputError("the documents hold no token", "documents of one token or more")
        self._counts = counts
        groups = self._group_chunks(counts)
        parts = [pack(counts[lo:hi], block_size, lo) for lo, hi in pairwise(groups)]
        self._pieces = concatenate_pieces(parts)
        self._chunk_edges: Integers | None = None
        if len(groups) > 2:
            self._chunk_edges = np.cumsum([0, *(part.num_blocks for part in parts)])

    def _group_chunks(self, lengths: Integers) -> list[int]:
        """Return the first document of each group of chunks, then the number of documents."""
        count = len(lengths)
        if self._documents.chunks is None:
            return [0, count]
        ends = self._documents.chunks.edges[1:]
        tokens = np.cumsum(lengths)[ends - 1]
        groups = [0]
        enough = MIN_BLOCKS_PER_GROUP * self.block_size
        grouped = 0
        for end, total in zip(ends.tolist(), tokens.tolist(), strict=True):
            if total - grouped >= enough:
                groups.append(end)
                grouped = total
        if len(groups) > 1:
            groups.pop()  # the last group takes the rest along, which may be short
        return [*groups, count]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._pieces.num_blocks

    @property
    def contents(self) -> list[list[str]] | None:
        """The name and a hash of each file of the documents."""
        return get_contents(self._documents.data)

    @property
    def chunk_edges(self) -> Integers | None:
        """The first block of each group of chunks of documents; None if they have no chunks."""
        return self._chunk_edges

    @property
    def fill(self) -> float:
        """The part of all blocks that holds tokens of documents."""
        return int(self._pieces.lengths.sum()) / (len(self) * self.block_size)

    def read(self, indices: Integers) -> dict[str, Any]:
        """Return these blocks."""
        pieces = self._pieces
        spans = [slice(*pieces.block_edges[index : index + 2].tolist()) for index in indices]
        needed = np.concatenate([pieces.documents[span] for span in spans])
        documents, numbers = np.unique(needed, return_inverse=True)
        _, texts, lengths = self._documents.read(documents)
        self._validate_lengths(documents, lengths)
        texts = split_documents(texts)
        shape = (len(indices), self.block_size)
        blocks = {
            "tokens": np.zeros(shape, np.int64),
            "targets": np.full(shape, IGNORED),
            "positions": np.zeros(shape, np.int64),
            "documents": np.zeros(shape, np.int64),
        }
        piece_numbers = iter(numbers.tolist())
        for row, span in enumerate(spans):
            end = 0
            piece_lengths = zip(pieces.starts[span], pieces.lengths[span], strict=True)
            for number, (start, length) in enumerate(piece_lengths, 1):
                text = texts[next(piece_numbers)]
                tokens = np.asarray(text[start : start + length + 1])
                _validate_tokens(tokens)
                begin = end
                end += length
                targets = tokens[1 : length + 1]
                blocks["tokens"][row, begin:end] = tokens[:length]
                blocks["targets"][row, begin : begin + len(targets)] = targets
                blocks["positions"][row, begin:end] = np.arange(length)
                blocks["documents"][row, begin:end] = number
        return blocks

    def _validate_lengths(self, documents: Integers, lengths: Integers) -> None:
        """Raise InputError if documents are not as long as when they were packed."""
        expected = self._counts[documents]
        for place in np.flatnonzero(lengths != expected)[:1]:
            raise InputError(
                f"document {documents[place]} has {lengths[place]} tokens, and was packed as one of"
                f" {expected[place]}",
                LENGTHS_HINT,
            )


def _validate_tokens(tokens: Integers) -> None:
    """Raise InputError if the tokens of a document are no whole numbers."""
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise InputError(
            f"a document holds {tokens.dtype} of {tokens.ndim} axes, not whole numbers of one",
            SOURCE_HINT,
        )
