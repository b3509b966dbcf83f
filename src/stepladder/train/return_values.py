"""Validation of what a job's functions return: sums, counts and names of metrics.

Each error names the function and shows what it has returned.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from stepladder.core.errors import InputError, to_one_line

LOSS_HINT = (
    "return (sum, count): the sum over the batch as a scalar tensor with its gradient,"
    " and what it counts"
)
METRICS_HINT = (
    'return {"name": (sum, count)}, two numbers for each name, and the same names for each batch'
)
DERIVED_HINT = 'return {"name": value}, a number for each name'
# Other keys of the lines in metrics.jsonl, so no metric can have such a name.
RESERVED_NAMES = ("step", "epoch", "lr", "grad_norm", "train_loss")
MAX_METRIC_NAME_LENGTH = 100
MAX_ITEMS_SHOWN = 4


def parse_loss(result: Any, samples: int) -> tuple[Tensor, float]:
    """Return the sum, shape (), and the count of what `loss` has returned.

    Args:
        result: (sum, count), or one tensor, which is the mean over the samples.
        samples: The number of samples in the batch.

    Returns:
        The sum as a tensor of shape () with a gradient, and the count.

    Raises:
        InputError: The result has another form, or the count is negative or not finite.
    """  # noqa: DOC501 - make_error makes an InputError
    total: Any = result
    count: Any = None
    if isinstance(result, tuple) and len(result) == 2:
        total, count = result
    if not (_is_number(total) and isinstance(total, Tensor) and total.requires_grad):
        raise make_error("loss", result, LOSS_HINT)
    if total is result:
        total = total * samples
        count = samples
    # Converted once: if it is a tensor on a GPU, this waits for the forward pass.
    count_value = float(count) if _is_number(count) else -1.0
    if not 0 <= count_value < math.inf:
        raise make_error("loss", result, LOSS_HINT)
    return total if total.ndim == 0 else total.reshape(()), count_value


def validate_metrics(result: Any, expected_names: list[str] | None) -> None:
    """Raise InputError unless `metrics` has returned sums and counts by the expected names."""
    is_valid = (
        isinstance(result, dict)
        and bool(result)
        and all(_is_sum_and_count(value) for value in result.values())
        and (expected_names is None or set(expected_names) == result.keys())
    )
    if not is_valid:
        raise make_error("metrics", result, METRICS_HINT)
    _validate_metric_names("metrics", result)


def _is_sum_and_count(value: Any) -> bool:
    """Return whether a value is a pair of numbers."""
    if not isinstance(value, (tuple, list)):
        return False
    return len(value) == 2 and all(map(_is_number, value))


def validate_counts(counts: np.ndarray, names: list[str]) -> None:
    """Raise InputError if one of the counts, shape (batches, names), is negative or not finite."""
    is_valid = np.isfinite(counts) & (counts >= 0)
    for row in counts[~is_valid.all(axis=1)].tolist():
        result = {name: (..., count) for name, count in zip(names, row, strict=True)}
        raise make_error("metrics", result, METRICS_HINT)


def find_doubtful_counts(counts: np.ndarray, sizes: list[int], names: list[str]) -> list[str]:
    """Return a line for each metric that may be the mean of a batch, with a count of 1.

    Means of batches cannot be averaged if the batches differ in size.

    Args:
        counts: Of each batch, shape (batches, names).
        sizes: Samples of each batch.
        names: Of the metrics.
    """
    if len(set(sizes)) < 2:
        return []
    return [
        f"  metric {name} counts 1 for each batch, of {max(sizes)} samples as of {min(sizes)}:"
        " if it is a batch's mean, the result is wrong."
        " HINT: return (sum over the batch, its samples)"
        for name, column in zip(names, counts.T, strict=True)
        if (column == 1).all()
    ]


def _validate_metric_names(function: str, result: dict[Any, Any]) -> None:
    """Check that each metric has a name that a line, a file and a page can show.

    Args:
        function: The part of the job that has returned the result.
        result: The metrics by name.

    Raises:
        InputError: A name is not a short printable text, or is the name of a field that each line
            has.
    """
    for name in result:
        is_short_text = isinstance(name, str) and 0 < len(name) <= MAX_METRIC_NAME_LENGTH
        if not (is_short_text and name.isprintable()):
            raise InputError(
                f"{function} of the Job names a metric {to_one_line(repr(name))}",
                "a short text, as accuracy",
            )
        if name in RESERVED_NAMES:
            raise InputError(
                f"{function} of the Job names a metric {name!r}, which each line has",
                f"eval_{name}",
            )


def parse_derived(result: Any) -> dict[str, float]:
    """Return the metrics of `derived` as numbers; raise InputError if any is not a number."""
    if not (isinstance(result, dict) and all(map(_is_number, result.values()))):
        raise make_error("derived", result, DERIVED_HINT)
    _validate_metric_names("derived", result)
    return {name: float(value) for name, value in result.items()}


def validate_best(name: str, metrics: dict[str, float]) -> None:
    """Raise InputError if the job's `best` names none of the metrics."""
    if name not in metrics:
        raise InputError(
            f"best of the Job names the metric {name!r}", f"one of {', '.join(metrics)}; or None"
        )


def _is_number(value: Any) -> bool:
    """Return whether a value is a number or a tensor of one number, without waiting for a GPU."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    try:  # int and float before Real: they are tested faster, and this runs in every step
        return isinstance(value, (int, float, Real)) and type(float(value)) is float
    except OverflowError:
        return False


def make_error(function: str, result: Any, hint: str) -> InputError:
    """Return the error for a function of the job that has returned something else."""
    return InputError(f"{function} of the Job has returned {describe(result)}", hint)


def describe(value: Any) -> str:
    """Return a short description of a value; of a tensor its shape, and its number if it is one."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if value is ...:
        return "..."
    if isinstance(value, tuple):
        items = [describe(item) for item in value[:MAX_ITEMS_SHOWN]]
        if len(value) > MAX_ITEMS_SHOWN:
            items.append("...")
        return f"({', '.join(items)})"
    if isinstance(value, dict):
        pairs = list(value.items())[:MAX_ITEMS_SHOWN]
        items = [f"{name!r:.40}: {describe(item)}" for name, item in pairs]
        return f"{{{', '.join(items)}}}"
    return to_one_line(repr(value))


def _describe_tensor(tensor: Tensor) -> str:
    text = f"a tensor of shape {list(tensor.shape)}"
    if tensor.requires_grad:
        return f"{text}, with a gradient"
    text += ", without a gradient"
    return f"{text}: {tensor.item()}" if tensor.numel() == 1 else text
