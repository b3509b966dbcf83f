"""What a job's functions return: taken as it is meant, or refused in a line that names the
function.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
import torch

from stepladder.core.errors import InputError, one_line

LOSS_HINT = "return (sum, count): the sum over the batch as a scalar tensor with its gradient, and what it counts"
RESERVED_NAMES = (
    "step",
    "epoch",
    "lr",
    "grad_norm",
    "train_loss",
)  # of a line in metrics.jsonl: no metric can be called so
MAX_METRIC_NAME_LENGTH = 100
METRICS_HINT = (
    'return {"name": (sum, count)}, two numbers for each name, and the same names for each batch'
)
DERIVED_HINT = 'return {"name": value}, a number for each name'


def parse_loss(result: Any, samples: int) -> tuple[torch.Tensor, float]:
    """Sum and count of what `loss` has returned for so many samples; one tensor is their mean."""
    total: Any
    count: Any
    total, count = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not (is_number(total) and isinstance(total, torch.Tensor) and total.requires_grad):
        raise make_error("loss", result, LOSS_HINT)
    if total is result:
        total, count = total * samples, samples
    counted = float(count) if is_number(count) else -1.0  # once: on a GPU it waits for the pass
    if not 0 <= counted < math.inf:
        raise make_error("loss", result, LOSS_HINT)
    return total if total.ndim == 0 else total.reshape(()), counted


def validate_metrics(result: Any, names: list[str] | None) -> None:
    """Raises InputError where `metrics` has not returned sums and counts. names: those of an
    earlier batch.
    """
    sound = isinstance(result, dict) and all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(is_number, pair))
        for pair in result.values()
    )
    if not sound or not result or (names is not None and set(names) != result.keys()):
        raise make_error("metrics", result, METRICS_HINT)
    validate_metric_names("metrics", result)


def validate_counts(counts: np.ndarray, names: list[str]) -> None:
    """Raises InputError where a batch's count, shape (batches, names), is nothing that can be
    counted.
    """
    for row in counts[~(np.isfinite(counts) & (counts >= 0)).all(axis=1)]:
        raise make_error(
            "metrics",
            {name: (..., count) for name, count in zip(names, row.tolist(), strict=True)},
            METRICS_HINT,
        )


def find_doubtful_counts(counts: np.ndarray, sizes: list[int], names: list[str]) -> list[str]:
    """Return a line for each metric that may be a mean of each batch, counted once, where batches
    differ in size.

    Args:
        counts: of each batch, shape (batches, names).
        sizes: samples of each batch.
        names: of the metrics.
    """
    if len(set(sizes)) < 2:
        return []
    return [
        f"  metric {name} counts 1 for each batch, of {max(sizes)} samples as of {min(sizes)}: if it is a batch's"
        " mean, the result is wrong. HINT: return (sum over the batch, its samples)"
        for name, column in zip(names, counts.T, strict=True)
        if (column == 1).all()
    ]


def validate_metric_names(part: str, result: dict[Any, Any]) -> None:
    """Raises InputError for a metric that no line, file or page could name."""
    for name in result:
        if not (
            isinstance(name, str) and 0 < len(name) <= MAX_METRIC_NAME_LENGTH and name.isprintable()
        ):
            raise InputError(
                f"{part} of the Job names a metric {one_line(repr(name))}",
                "a short text, as accuracy",
            )
        if name in RESERVED_NAMES:
            raise InputError(
                f"{part} of the Job names a metric {name!r}, which each line has", f"eval_{name}"
            )


def parse_derived(result: Any) -> dict[str, float]:
    """The further metrics that `derived` has returned."""
    if not (isinstance(result, dict) and all(map(is_number, result.values()))):
        raise make_error("derived", result, DERIVED_HINT)
    validate_metric_names("derived", result)
    return {name: float(value) for name, value in result.items()}


def validate_best(name: str, metrics: dict[str, float]) -> None:
    """Raises InputError where the Job's `best` names none of the metrics."""
    if name not in metrics:
        raise InputError(
            f"best of the Job names the metric {name!r}", f"one of {', '.join(metrics)}; or None"
        )


def is_number(value: Any) -> bool:
    """A plain number, or a tensor of one. On a GPU nothing waits for it."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    try:  # the first two cost less to ask for, in every step
        return isinstance(value, (int, float, Real)) and type(float(value)) is float
    except OverflowError:
        return False


def make_error(part: str, result: Any, hint: str) -> InputError:
    return InputError(f"{part} of the Job has returned {describe(result)}", hint)


def describe(value: Any) -> str:
    """In a few words: of a tensor its form, and its number where that is all, such as a count."""
    if isinstance(value, torch.Tensor):
        form = f"a tensor of shape {list(value.shape)}"
        if value.requires_grad:
            return f"{form}, with a gradient"
        return f"{form}, without a gradient" + (f": {value.item()}" if value.numel() == 1 else "")
    if value is ...:
        return "..."
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value[:4]))}{', ...' if len(value) > 4 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r:.40}: {describe(part)}' for name, part in list(value.items())[:4])}}}"
    return one_line(repr(value))
