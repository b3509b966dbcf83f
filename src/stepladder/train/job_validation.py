"""What is wrong with a job's parts, before anything is done with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stepladder.core.errors import InputError, one_line
from stepladder.train.build_errors import validate_unwrapped
from stepladder.train.job import Job
from stepladder.train.optimizers import list_optimizers


def is_schedule(part: Any) -> bool:
    return part is None or all(
        hasattr(one, "step") for one in (part if isinstance(part, tuple) else (part,))
    )


# Of a job: what is sound, and what to write.
JOB_PARTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (
        lambda part: isinstance(part, torch.nn.Module),
        "torch.nn.Linear(20, 1), or another module",
    ),
    "optimizer": (
        lambda part: isinstance(part, torch.optim.Optimizer),
        "torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    "loss": (callable, "a function of (model, batch) that returns (sum, count)"),
    "metrics": (
        lambda part: part is None or callable(part),
        "a function of (model, batch), or None",
    ),
    "derived": (
        lambda part: part is None or callable(part),
        "a function of the metrics' means, or None",
    ),
    "collate": (
        lambda part: part is None or callable(part),
        "a function of a list of samples, or None",
    ),
    "schedule": (
        is_schedule,
        "a scheduler of torch.optim.lr_scheduler, or a tuple of them",
    ),
    "schedule_per": (lambda part: part in ("step", "epoch"), '"step" or "epoch"'),
    "ema_decay": (
        lambda part: part is None or (isinstance(part, float) and 0 <= part < 1),
        "0.999, or None",
    ),
    "clip_norm": (
        lambda part: part is None or (isinstance(part, (int, float)) and part > 0),
        "1.0, or None",
    ),
    "best": (
        lambda part: part is None or (isinstance(part, tuple) and part[1:] in (("max",), ("min",))),
        '("loss", "min")',
    ),
    "unit": (
        lambda part: isinstance(part, str) and part.isprintable(),
        '"tokens", or another word',
    ),
    "blocks": (
        lambda part: isinstance(part, tuple) and {*map(type, part)} <= {type},
        "(Block,), of classes",
    ),
    "num_workers": (lambda part: isinstance(part, int) and part >= 0, "0, or more"),
    "eval_batch": (lambda part: isinstance(part, int) and part >= 1, "1, or more"),
}


def validate_parts(job: Job) -> None:
    """Raises InputError for the first part of a job that is not what its docstring says."""
    for name, (is_sound, wanted) in JOB_PARTS.items():
        if not is_sound(value := getattr(job, name)):
            raise InputError(f"{name} of the Job is {one_line(repr(value))}", f"{name}={wanted}")
    validate_unwrapped(job.model)


def validate_parameters(job: Job) -> None:
    """Raises InputError where the optimizer moves parameters that no gradient synchronisation would
    see.
    """
    known = {id(p) for p in job.model.parameters()}
    foreign = [
        p.shape
        for group in job.optimizer.param_groups
        for p in group["params"]
        if id(p) not in known
    ]
    if foreign:
        raise InputError(
            f"the optimizer has {len(foreign)} parameters that are not the model's, the first of shape"
            f" {list(foreign[0])}",
            "make them part of the model (a submodule), and build the optimizer from model.parameters()",
        )


def validate_adafactor(job: Job) -> None:
    """Raises InputError where Adafactor has a weight without elements: it divides by their number."""
    for optimizer in list_optimizers(job.optimizer):
        params = [
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad
        ]
        empty = [param for param in params if not param.numel()]
        if empty and isinstance(optimizer, torch.optim.Adafactor):
            raise InputError(
                f"Adafactor cannot step a weight without elements, as the one of shape {list(empty[0].shape)}",
                "torch.optim.Adafactor([p for p in model.parameters() if p.numel()])",
            )
