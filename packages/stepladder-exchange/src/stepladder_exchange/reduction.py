"""What a reduction does with the numbers of all ranks: add them, or something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Reduction(NamedTuple):
    """A reduction over the ranks, which is done in rank order.

    Args:
        name: Its name, which must be the same on all ranks.
        combine: Combines the results of the ranks so far with the numbers of the next rank.
        is_mean: Whether the result is divided by the number of ranks.
    """

    name: str
    combine: Callable[..., object]
    is_mean: bool = False

    def reduce(self, rows: list[torch.Tensor], out: torch.Tensor) -> None:
        """Write the reduction of two or more rows into `out`."""
        combine = self.combine
        combine(rows[0], rows[1], out=out)
        for row in rows[2:]:
            combine(out, row, out=out)
        if self.is_mean:
            out.div_(len(rows))


SUM = Reduction("sum", torch.add)
MEAN = Reduction("mean", torch.add, is_mean=True)
PRODUCT = Reduction("product", torch.mul)
MINIMUM = Reduction("minimum", torch.minimum)
MAXIMUM = Reduction("maximum", torch.maximum)
BITWISE_AND = Reduction("and", torch.bitwise_and)
BITWISE_OR = Reduction("or", torch.bitwise_or)
BITWISE_XOR = Reduction("xor", torch.bitwise_xor)
