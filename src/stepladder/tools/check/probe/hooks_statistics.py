"""Hooks that record the numbers of which metrics are made: losses, means and sums of a batch."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepladder.tools.check.events import Statistic
from stepladder.tools.check.probe.patching import Fields, WrappedCall, default_on_error, wrap
from stepladder.tools.check.probe.probe_log import current_log, record

MAX_STATISTICS = 5000
# Functions of torch that return a mean over a batch, where nothing else is asked for.
MEAN_LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)


counts: Counter[str] = Counter()  # of what is recorded


@default_on_error(lambda: None)
def record_statistic(result: Any, is_mean: bool, count: int = 0) -> None:
    """Record a result with one number, until there are many; others have more numbers, or none."""
    is_number = isinstance(result, Tensor) and result.numel() == 1 and not result.is_meta
    if is_number and counts["statistics"] < MAX_STATISTICS and not torch.compiler.is_compiling():
        counts["statistics"] += 1
        value, grad = float(result.detach()), result.requires_grad
        record(Statistic(value=value, is_mean=is_mean, count=count, grad=grad))


def attach() -> None:
    for name in MEAN_LOSSES:
        wrap(functional, name, record_loss)
    for owner in (Tensor, torch):
        wrap(owner, "mean", partial(record_reduction, True))
        wrap(owner, "sum", partial(record_reduction, False))


def record_loss(call: WrappedCall) -> Any:
    result = call.run()
    record_statistic(result, is_mean_over_batch(call.kwargs))
    return result


def is_mean_over_batch(options: Fields) -> bool:
    """Return whether a loss with these options is a mean; the last two are torch's old ones."""
    is_sum = options.get("size_average") is False or options.get("reduce") is False
    return options.get("reduction", "mean") == "mean" and not is_sum


def record_reduction(is_mean: bool, call: WrappedCall) -> Any:
    """Record the result of a mean or a sum that the script asks for, and not the probe."""
    result = call.run()
    caller = sys._getframe(2)  # around the wrapper
    if current_log().is_user_file(caller.f_code.co_filename):
        record_statistic(result, is_mean, call.args[0].numel())
    return result
