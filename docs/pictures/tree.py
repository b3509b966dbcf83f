"""python docs/pictures/tree.py: exact mode's tree on 1, 2 and 3 processes, as `block_sizes` and
`share` cut it.
"""

from __future__ import annotations

from drawing import Drawing, save

from stepladder.core.plan import split_evenly
from stepladder.train.sync.binary_tree import split_into_blocks

MICROBATCHES, SIZES = 8, (1, 2, 3)
LEAF, LEVEL = 27, 40


def owners(world_size: int) -> dict[tuple[int, int], int]:
    """The rank that adds each sum [lo, lo + size) by itself; sums of several ranks are not in it."""
    found = {}
    for rank in range(world_size):
        lo, hi = split_evenly(MICROBATCHES, rank, world_size)
        for block in split_into_blocks(lo, hi):
            for size in (1 << level for level in range(block.bit_length())):
                found |= {(at, size): rank for at in range(lo, lo + block, size)}
            lo += block
    return found


def picture() -> Drawing:
    drawing = Drawing(
        760, 262, "The same tree of sums on 1, 2 and 3 processes; only who adds what differs"
    )
    depth = MICROBATCHES.bit_length()
    for column, world_size in enumerate(SIZES):
        left, owner = 22 + column * 248, owners(world_size)

        def middle(lo: int, size: int, left: int = left) -> float:
            return left + (lo + size / 2) * LEAF

        for level in reversed(range(depth)):
            size, y = 1 << level, 24 + (depth - 1 - level) * LEVEL
            for lo in range(0, MICROBATCHES, size):
                x = middle(lo, size)
                for half in (lo, lo + size // 2) if level else ():
                    drawing.line(x, y + 12, middle(half, size // 2), y + LEVEL - 12)
                look = f"r{owner[lo, size]}" if (lo, size) in owner else "dashed"
                drawing.box(x - 12, y - 12, 24, 24, look, str(lo) if size == 1 else "+")
        drawing.text(
            middle(0, MICROBATCHES), 178, f"{world_size} process{'es' * (world_size > 1)}", "bold"
        )
    for rank in range(SIZES[-1]):
        drawing.box(76 + rank * 84, 206, 18, 18, f"r{rank}")
        drawing.text(102 + rank * 84, 220, f"rank {rank}", "small", "start")
    drawing.box(338, 206, 18, 18, "dashed")
    drawing.text(364, 220, "a sum over several ranks: each adds a slice of it", "small", "start")
    drawing.text(380, 246, "leaves are the gradients of microbatches 0 to 7", "small soft")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
