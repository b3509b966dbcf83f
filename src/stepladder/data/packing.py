"""Packing: which documents share a block of tokens. Pure arithmetic on their lengths."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Bins = dict[int, list[Integers]]  # by free space: blocks that have so much


@dataclass(frozen=True)
class _Pieces:
    """Documents, or parts of documents longer than a block, in the order of the blocks.

    Args:
        documents: The document of each piece.
        starts: The first token of each piece in its document.
        lengths: The number of tokens of each piece.
        block_edges: The first piece of each block, then the number of pieces.
    """

    documents: Integers
    starts: Integers
    lengths: Integers
    block_edges: Integers

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.block_edges) - 1


def concatenate_pieces(parts: list[_Pieces]) -> _Pieces:
    """Return the blocks of several parts, one after the other."""
    firsts = np.cumsum([0, *(len(part.documents) for part in parts)])
    pairs = zip(parts, firsts, strict=False)
    edges = [part.block_edges[:-1] + first for part, first in pairs]
    return _Pieces(
        np.concatenate([part.documents for part in parts]),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([*edges, firsts[-1:]]),
    )


def pack(lengths: Integers, block_size: int, first_document: int = 0) -> _Pieces:
    """Return the pieces of documents, divided into as few blocks as a greedy rule needs.

    A document longer than a block is cut into full blocks and a rest. Then each piece, the longest
    first, goes into the block with the least space that it fits into (best-fit decreasing). All
    pieces of one length are placed together, so the time depends on the number of different
    lengths more than on the number of documents.

    Args:
        lengths: The tokens of each document, shape (documents,); a document of 0 is in no block.
        block_size: The tokens of a block.
        first_document: The number of the first document.

    Returns:
        The pieces, whose documents are numbered from `first_document`.
    """
    counts = -(-lengths // block_size)
    documents = np.repeat(np.arange(len(lengths)), counts)
    first_pieces = np.cumsum(counts) - counts
    starts = (np.arange(len(documents)) - first_pieces[documents]) * block_size
    piece_lengths = np.minimum(lengths[documents] - starts, block_size)
    blocks = _assign_blocks(piece_lengths, block_size)
    order = np.argsort(blocks, kind="stable")
    num_blocks = int(blocks.max()) + 1 if len(blocks) else 0
    return _Pieces(
        documents[order] + first_document,
        starts[order],
        piece_lengths[order],
        np.searchsorted(blocks[order], np.arange(num_blocks + 1)),
    )


def _assign_blocks(lengths: Integers, block_size: int) -> Integers:
    """Return the block of each piece, by best-fit decreasing, shape (pieces,)."""
    blocks = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(-lengths, return_counts=True)
    open_blocks = _OpenBlocks(block_size)
    end = 0
    longest_first = (-distinct).tolist()
    for length, count in zip(longest_first, counts.tolist(), strict=True):
        begin = end
        end += count
        while begin < end:
            chosen = open_blocks.fill(length, end - begin)
            blocks[by_length[begin : begin + len(chosen)]] = chosen
            begin += len(chosen)
    return blocks


class _OpenBlocks:
    """The blocks that still have space, by how much they have."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        self.spaces: list[int] = []  # increasing; the keys of `bins`
        self.bins: Bins = {}

    def fill(self, length: int, count: int) -> Integers:
        """Place up to `count` pieces into blocks of one space.

        Args:
            length: The tokens of each piece.
            count: The number of pieces, at least 1.

        Returns:
            The block of each piece that was placed, at least one.
        """
        index = bisect_left(self.spaces, length)
        if index < len(self.spaces):
            space = self.spaces[index]
        else:
            space = self.block_size
            self._add_new(-(-count // (space // length)))
        per_block = space // length
        blocks = self._remove(space, -(-count // per_block))
        placed = min(count, len(blocks) * per_block)
        full, remaining_count = divmod(placed, per_block)
        self._put(space - per_block * length, blocks[:full])
        if remaining_count:
            self._put(space - remaining_count * length, blocks[full:])
        return np.repeat(blocks, per_block)[:placed]

    def _add_new(self, count: int) -> None:
        self._put(self.block_size, np.arange(self.num_blocks, self.num_blocks + count))
        self.num_blocks += count

    def _put(self, space: int, blocks: Integers) -> None:
        if not space or not len(blocks):
            return
        if space not in self.bins:
            insort(self.spaces, space)
            self.bins[space] = []
        self.bins[space].append(blocks)

    def _remove(self, space: int, count: int) -> Integers:
        """Remove and return up to `count` blocks with this space."""
        parts = self.bins[space]
        blocks = parts.pop()
        if len(blocks) > count:
            parts.append(blocks[count:])
            blocks = blocks[:count]
        if not parts:
            del self.bins[space]
            self.spaces.remove(space)
        return blocks
