"""Every optimizer and every schedule of torch: the same weights in all ways, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from five_ways import STEPS, WAYS, Net, cross_entropy, make_data, train_in_ways
from stepladder import Job

SHARDED = {"optimizer", "copies", "full"}
# Of each optimizer: the ways in which it is refused.
OPTIMIZERS: dict[str, set[str]] = {
    "ASGD": SHARDED,
    "Adadelta": set(),
    "Adafactor": {"full"},
    "Adagrad": set(),
    "Adam": set(),
    "AdamW": set(),
    "Adamax": set(),
    "LBFGS": set(WAYS),
    "Muon": {"full"},
    "NAdam": set(),
    "RAdam": set(),
    "RMSprop": set(),
    "Rprop": set(),
    "SGD": set(),
    "SparseAdam": set(WAYS),
}
CONSTANT_THEN_EXPONENTIAL = (
    lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 3),
    lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
)


def make_parts(optimizer: Optimizer) -> list[Any]:
    return [make(optimizer) for make in CONSTANT_THEN_EXPONENTIAL]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda it: lr_scheduler.ChainedScheduler(make_parts(it)),
    "ConstantLR": CONSTANT_THEN_EXPONENTIAL[0],
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, STEPS),
    "CosineAnnealingWarmRestarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 3),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.001, 0.05, 3),
    "ExponentialLR": CONSTANT_THEN_EXPONENTIAL[1],
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda step: 0.9**step),
    "LinearLR": lambda it: lr_scheduler.LinearLR(it, 0.1, total_iters=7),
    "MultiStepLR": lambda it: lr_scheduler.MultiStepLR(it, [2, 6]),
    "MultiplicativeLR": lambda it: lr_scheduler.MultiplicativeLR(it, lambda step: 0.95),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.05, STEPS),
    "PolynomialLR": lambda it: lr_scheduler.PolynomialLR(it, STEPS),
    "ReduceLROnPlateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, patience=0, threshold=0.9),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(it, make_parts(it), [5]),
    "StepLR": lambda it: lr_scheduler.StepLR(it, 3, 0.5),
    "SWALR": lambda it: SWALR(it, 0.002, 5),
}
CHANGES_MOMENTUM = ("CyclicLR", "OneCycleLR")


def list_classes(module: Any, base: type) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    } - {"_LRScheduler"}


def make_job(kind: str) -> Job:
    """A job of one optimizer with a cosine, or of one schedule with SGD or AdamW."""
    torch.manual_seed(0)
    model = Net()
    params = [p for p in model.parameters() if kind != "Muon" or p.ndim == 2]
    name = kind
    if kind in SCHEDULES:
        name = "SGD" if kind in CHANGES_MOMENTUM else "AdamW"
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(params, lr=0.02, **options)
    schedule = SCHEDULES.get(kind, SCHEDULES["CosineAnnealingLR"])(optimizer)
    return Job(model, optimizer, cross_entropy, make_data(), schedule=schedule)


def test_each_optimizer_and_schedule_of_torch_is_decided() -> None:
    known = set(OPTIMIZERS) if hasattr(torch.optim, "Muon") else set(OPTIMIZERS) - {"Muon"}
    assert list_classes(torch.optim, Optimizer) == known
    assert list_classes(lr_scheduler, lr_scheduler.LRScheduler) == set(SCHEDULES) - {"SWALR"}


def test_an_option_that_torch_refuses_in_a_step_is_one_line(tmp_path: Path) -> None:
    def make(kind: str) -> Job:
        job = make_job("AdamW")
        job.optimizer.param_groups[0]["capturable"] = True
        return job

    results = train_in_ways(make, ["AdamW"], tmp_path, ["one"])
    assert "refused: a step of AdamW fails: If capturable=True" in results["one"]["AdamW"]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.ranks
@pytest.mark.parametrize("table", [OPTIMIZERS, SCHEDULES], ids=["optimizers", "schedules"])
def test_each_has_the_same_weights_in_all_ways_or_is_refused(
    table: dict[str, Any], tmp_path: Path
) -> None:
    results = train_in_ways(make_job, table, tmp_path)
    hashes = set()
    for kind in table:
        refused = {way for way in WAYS if results[way][kind].startswith("refused: ")}
        assert refused == OPTIMIZERS.get(kind, set()), results
        assert all(kind in results[way][kind] for way in refused)
        same = {results[way][kind] for way in WAYS if way not in refused}
        assert len(same) <= 1, (kind, {way: results[way][kind] for way in WAYS})
        hashes |= same
    # Each of them trains in a way of its own, apart from two pairs that are the same by chance.
    trained = [kind for kind in table if OPTIMIZERS.get(kind) != set(WAYS)]
    assert len(hashes) >= len(trained) - 1
