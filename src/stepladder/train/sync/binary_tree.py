"""The fixed binary tree of `--sync exact`: which sums of microbatches a rank holds, and what is
left to add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from stepladder.core.plan import split_evenly


@dataclass
class Block:
    """The tree's sum over microbatches [lo, lo + size)."""

    lo: int
    size: int
    total: Any  # a tensor; or the number of one


class Tree:
    """Blocks in order of their microbatches; neighbours that form a subtree are added at once.

    A binary counter: at most log2(M) + 1 blocks are held.  add: by default into the left one.
    """

    def __init__(self, add: Callable[[Any, Any], Any] = torch.Tensor.add_) -> None:
        self.add = add
        self.blocks: list[Block] = []

    def push(self, block: Block) -> list[Any]:
        """Add the next block. Returns tensors that are free again."""
        freed = []
        while (
            self.blocks
            and self.blocks[-1].size == block.size
            and self.blocks[-1].lo % (2 * block.size) == 0
        ):
            left = self.blocks.pop()
            freed.append(block.total)
            block = Block(left.lo, 2 * left.size, self.add(left.total, block.total))
        self.blocks.append(block)
        return freed

    def root(self) -> Any:
        """The sum over everything pushed: what is left are the subtrees of the right edge."""
        total = self.blocks[-1].total
        for block in reversed(self.blocks[:-1]):
            total = self.add(block.total, total)
        return total


def split_into_blocks(lo: int, hi: int) -> list[int]:
    """Sizes of the maximal aligned subtrees that [lo, hi) falls into, in order."""
    sizes = []
    while lo < hi:
        size = 1 << (hi - lo).bit_length() - 1  # the largest power of two that fits
        while lo % size:
            size //= 2
        sizes.append(size)
        lo += size
    return sizes


@lru_cache(maxsize=16)
def block_sizes_by_rank(total: int, world_size: int) -> list[list[int]]:
    """Of the blocks that each rank has of `total` microbatches."""
    return [split_into_blocks(*split_evenly(total, rank, world_size)) for rank in range(world_size)]


@lru_cache(maxsize=16)
def remaining_additions(total: int, world_size: int) -> list[tuple[int, int]]:
    """What is left to add of all ranks' blocks: pairs of their numbers, the sum takes the first
    one's place.
    """
    pairs: list[tuple[int, int]] = []

    def note(left: Any, right: Any) -> Any:
        pairs.append((left, right))
        return left

    tree, lo = Tree(note), 0
    for number, size in enumerate(chain.from_iterable(block_sizes_by_rank(total, world_size))):
        tree.push(Block(lo, size, number))
        lo += size
    tree.root()
    return pairs


def add_remaining(
    blocks: Iterable[torch.Tensor], pairs: list[tuple[int, int]], out: torch.Tensor
) -> None:
    """Add all blocks by `pairs`, the last of which leaves the sum of all in `out`. They stay as
    they are.
    """
    sums = list(blocks)
    for left, right in pairs[:-1]:
        sums[left] = sums[left] + sums[right]
    if pairs:
        left, right = pairs[-1]
        torch.add(sums[left], sums[right], out=out)
    else:
        out.copy_(sums[0])
