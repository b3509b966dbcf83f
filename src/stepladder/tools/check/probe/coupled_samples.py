"""Whether a loss compares the samples of a batch with each other, as one of pairs does.

The gradient that a mean over samples gives to the output of one sample depends on no other output.
So its derivative by these is exactly 0, whatever random numbers and targets are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepladder.tools.check.probe.patching import default_on_error

NEGLIGIBLE = 1e-5  # of the largest derivative


@default_on_error(list)
def find_coupled(loss: Tensor, outputs: Sequence[Tensor], count: int) -> list[int]:
    """Return the outputs that a loss compares with those of other samples, by their indices.

    The gradient of half of the samples depends on the other half then. What another model has got
    is not compared: its batch norm sees all samples. A loss without a second derivative is not
    known to compare anything.

    Args:
        loss: The loss, shape [].
        outputs: What models have returned. Those whose rows are samples have shape [n, ...], where
            n is a multiple of `count`: several views of each sample, in turn or side by side.
        count: The number of samples.
    """
    if count < 2 or loss.numel() != 1:
        return []
    indices = [
        index
        for index, item in enumerate(outputs)
        if item.requires_grad and item.ndim and len(item) >= count and len(item) % count == 0
        if not any(_is_made_of(other, item) for other in outputs)
    ]
    rows = [outputs[index] for index in indices]
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss, rows, create_graph=True, allow_unused=True)
        is_coupled = all(
            _depend_on_others(gradients, rows, count, side_by_side=layout)
            for layout in (False, True)
        )
    return indices if is_coupled else []


def _is_made_of(output: Tensor, item: Tensor) -> bool:
    if output is item or not output.requires_grad:
        return False
    found = torch.autograd.grad(output.sum(), [item], retain_graph=True, allow_unused=True)
    return found[0] is not None


def _depend_on_others(
    gradients: Sequence[Tensor | None], rows: Sequence[Tensor], count: int, side_by_side: bool
) -> bool:
    total = torch.zeros(())
    for gradient, item in zip(gradients, rows, strict=True):
        if gradient is not None and gradient.requires_grad:
            half = gradient[_is_in_half(item, count, side_by_side)].flatten()
            total = total + half @ torch.arange(len(half)).to(half).sin()
    if not total.requires_grad:
        return False
    second = torch.autograd.grad(total, rows, retain_graph=True, allow_unused=True)
    pairs = [(item, by) for item, by in zip(rows, second, strict=True) if by is not None]
    largest = max((float(by.abs().max()) for _, by in pairs), default=0.0)
    others = [by[~_is_in_half(item, count, side_by_side)] for item, by in pairs]
    return max(float(by.abs().max()) for by in others) > NEGLIGIBLE * largest


def _is_in_half(rows: Tensor, count: int, side_by_side: bool) -> Tensor:
    """Return which rows are of the first half of the samples, a bool tensor of shape [n]."""
    number = torch.arange(len(rows))
    sample = number // (len(rows) // count) if side_by_side else number % count
    return sample < count // 2
