"""Hooks that record the numbers of which metrics are made: losses, means and sums of a batch."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepladder.tools.check.events import Statistic
from stepladder.tools.check.probe.patching import default_on_error, wrap
from stepladder.tools.check.probe.probe_log import current_log

LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
MAX_STATISTICS = 5000


class Statistics:
    """Records scalars, until there are many."""

    def __init__(self) -> None:
        self.count = 0

    @default_on_error(lambda: None)
    def record(
        self,
        result: Any,
        is_mean: bool,
    ) -> None:
        """Record a result with one number; None, more numbers and those of a graph are left out."""
        is_number = isinstance(result, Tensor) and result.numel() == 1 and not result.is_meta
        if is_number and self.count < MAX_STATISTICS and not torch.compiler.is_compiling():
            self.count += 1
            value = float(result.detach())
            current_log().write_with_line(
                Statistic(
                    value=value,
                    is_mean=is_mean,
                )
            )


statistics = Statistics()


def attach() -> None:
    for name in LOSSES:
        wrap(functional, name, record_loss)
    for owner in (Tensor, torch):
        wrap(owner, "mean", record_mean)
        wrap(owner, "sum", record_sum)


def record_loss(
    original: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = original(
        *args,
        **kwargs,
    )
    statistics.record(
        result,
        is_mean_over_batch(kwargs),
    )
    return result


def is_mean_over_batch(options: dict[str, Any]) -> bool:
    """Return whether a loss with these options is a mean; the last two are torch's old ones."""
    is_sum = options.get("size_average") is False or options.get("reduce") is False
    return options.get("reduction", "mean") == "mean" and not is_sum


def record_mean(
    original: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = original(
        *args,
        **kwargs,
    )
    if is_called_in_user_file():
        statistics.record(
            result,
            True,
        )
    return result


def record_sum(
    original: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = original(
        *args,
        **kwargs,
    )
    if is_called_in_user_file():
        statistics.record(
            result,
            False,
        )
    return result


def is_called_in_user_file() -> bool:
    """Return whether the function that is wrapped was called by the script, not by the probe."""
    caller = sys._getframe(3)
    return current_log().is_user_file(caller.f_code.co_filename)
