"""The fixed binary tree of `--sync exact`: which sums a rank holds, and which additions remain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from stepladder.core.plan import split_evenly


@dataclass
class Block:
    """The tree's sum over the microbatches [lo, lo + size).

    Args:
        lo: The first microbatch.
        size: How many microbatches, a power of two.
        total: Their sum: a tensor, or the index of a tensor where only the order of the additions
            is planned.
    """

    lo: int
    size: int
    total: Any


class Tree:
    """Adds blocks as they come: neighbours that form a complete subtree become one block at once.

    The blocks are pushed in the order of their microbatches. As in a binary counter, M microbatches
    leave at most log2(M) + 1 blocks.
    """

    def __init__(self, add: Callable[[Any, Any], Any] = Tensor.add_) -> None:
        """Create an empty tree.

        Args:
            add: Adds two totals; by default in place, into the left one.
        """
        self.add = add
        self.blocks: list[Block] = []

    def push(self, block: Block) -> list[Any]:
        """Add the next block, and return the totals that are free for reuse."""
        freed = []
        while (
            self.blocks
            and self.blocks[-1].size == block.size
            and self.blocks[-1].lo % (2 * block.size) == 0
        ):
            neighbour = self.blocks.pop()
            freed.append(block.total)
            total = self.add(neighbour.total, block.total)
            block = Block(neighbour.lo, 2 * neighbour.size, total)
        self.blocks.append(block)
        return freed

    def root(self) -> Any:
        """Return the sum of all blocks, added from the last block to the first, as the tree has it.

        The default `add` overwrites the blocks' totals, so call this once.
        """
        total = self.blocks[-1].total
        for block in reversed(self.blocks[:-1]):
            total = self.add(block.total, total)
        return total


def split_into_blocks(lo: int, hi: int) -> list[int]:
    """Return the sizes of the maximal aligned subtrees of [lo, hi), in order."""
    sizes = []
    while lo < hi:
        size = 1 << ((hi - lo).bit_length() - 1)  # the largest power of two that fits
        while lo % size:  # a subtree of this size begins at a multiple of its size
            size //= 2
        sizes.append(size)
        lo += size
    return sizes


@lru_cache(maxsize=16)
def split_by_rank(total: int, world_size: int) -> list[list[int]]:
    """Return the sizes of the blocks that each rank holds of `total` microbatches."""
    shares = [split_evenly(total, rank, world_size) for rank in range(world_size)]
    return [split_into_blocks(lo, hi) for lo, hi in shares]


@lru_cache(maxsize=16)
def plan_additions(total: int, world_size: int) -> list[tuple[int, int]]:
    """Plan the additions that complete the tree from the blocks of all ranks.

    Args:
        total: How many microbatches.
        world_size: How many ranks.

    Returns:
        Pairs of indices into the blocks of rank 0, rank 1, and so on. Each sum replaces the first
        block of its pair.
    """
    pairs: list[tuple[int, int]] = []

    def record_addition(first: int, second: int) -> int:
        pairs.append((first, second))
        return first

    tree = Tree(record_addition)
    lo = 0
    sizes = chain.from_iterable(split_by_rank(total, world_size))
    for index, size in enumerate(sizes):
        tree.push(Block(lo, size, index))
        lo += size
    tree.root()
    return pairs


def add_in_order(blocks: Iterable[Tensor], pairs: list[tuple[int, int]], out: Tensor) -> None:
    """Add all blocks in the order of `pairs`, and store the sum in `out`; no block is changed."""
    sums = list(blocks)
    for first, second in pairs[:-1]:
        sums[first] = sums[first] + sums[second]
    if pairs:
        first, second = pairs[-1]
        torch.add(sums[first], sums[second], out=out)
    else:
        out.copy_(sums[0])
