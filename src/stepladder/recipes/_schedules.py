"""Schedules of the learning rate, used by several recipes."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def count_steps(epochs: int, samples: int, global_batch: int) -> int:
    """Return the number of optimizer steps of a run; an epoch's last batch may be smaller."""
    return epochs * math.ceil(samples / global_batch)


def one_cycle(optimizer: Optimizer, steps: int, rise_steps: int) -> LambdaLR:
    """Make a schedule with a linear rise to the full rate, then a linear fall to zero."""
    rise_steps = max(1, rise_steps)
    fall_steps = steps - rise_steps + 1

    def rate_factor(step: int) -> float:
        rising = (step + 1) / rise_steps
        falling = (steps - step) / fall_steps
        return min(rising, max(0.0, falling))

    return LambdaLR(optimizer, rate_factor)


def linear_decay(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Make a schedule that falls from the full rate to zero."""
    return LambdaLR(optimizer, lambda step: 1 - step / steps)
