"""What a job's functions return: taken as it is meant, or refused in a line that names the function."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from stepladder.core.errors import InputError, one_line

LOSS = "return (sum, count): the sum over the batch as a scalar tensor with its gradient, and what it counts"
METRICS = 'return {"name": (sum, count)}, two numbers for each name, and the same names for each batch'
DERIVED = 'return {"name": value}, a number for each name'


def loss_of(result: Any, samples: int) -> tuple[torch.Tensor, float]:
    """Sum and count of what `loss` has returned for so many samples; one tensor is their mean."""
    total: Any
    count: Any
    total, count = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not (isinstance(total, torch.Tensor) and total.numel() == 1 and total.requires_grad):
        raise refusal("loss", result, LOSS)
    if total is result:
        total, count = total * samples, samples
    if not (is_number(count) and float(count) >= 0):
        raise refusal("loss", result, LOSS)
    return total.reshape(()), float(count)


def refuse_odd_metrics(result: Any, names: list[str] | None) -> None:
    """Raises InputError where `metrics` has not returned sums and counts. names: those of an earlier batch."""
    sound = isinstance(result, dict) and all(
        isinstance(name, str) and isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(is_number, pair))
        for name, pair in result.items()
    )
    if not sound or (names is not None and set(names) != result.keys()):
        raise refusal("metrics", result, METRICS)


def derived_of(result: Any) -> dict[str, float]:
    """The further metrics that `derived` has returned."""
    if not (isinstance(result, dict) and all(isinstance(name, str) for name in result)):
        raise refusal("derived", result, DERIVED)
    if not all(map(is_number, result.values())):
        raise refusal("derived", result, DERIVED)
    return {name: float(value) for name, value in result.items()}


def refuse_unknown_best(name: str, metrics: dict[str, float]) -> None:
    """Raises InputError where the Job's `best` names none of the metrics."""
    if name not in metrics:
        raise InputError(f"best of the Job names the metric {name!r}", f"one of {', '.join(metrics)}; or None")


def is_number(value: Any) -> bool:
    """A plain number, or a tensor of one. On a GPU nothing waits for it."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def refusal(part: str, result: Any, hint: str) -> InputError:
    return InputError(f"{part} of the Job has returned {told(result)}", hint)


def told(value: Any) -> str:
    """In a few words: of a tensor its form, not its numbers."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}, {'with' if value.requires_grad else 'without'} a gradient"
    if isinstance(value, tuple):
        return f"({', '.join(map(told, value[:4]))}{', ...' if len(value) > 4 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r:.40}: {told(part)}' for name, part in list(value.items())[:4])}}}"
    return one_line(repr(value))
