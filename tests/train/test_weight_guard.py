"""Weights that something besides the optimizer's step changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stepladder.train.weight_guard import PassGuard, WeightChanged, validate_unchanged_weights


def write_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def write_through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


def write_through_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[0] = 3


def replace_data(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.5


WRITES = [write_in_place, write_through_data, write_through_numpy, replace_data]


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_named(write: Callable[[nn.Parameter], None], is_frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(not is_frozen)
    guard = PassGuard(model)
    guard.begin(compares_values=True)
    guard.validate()
    write(model[1].weight)
    with pytest.raises(WeightChanged, match=r"changes the weight 1\.weight") as raised:
        guard.validate()
    assert ("ema_decay" in raised.value.hint) == is_frozen


@pytest.mark.parametrize("write", WRITES)
def test_a_metric_may_write_what_it_restores(write: Callable[[nn.Parameter], None]) -> None:
    model = nn.Linear(2, 2)
    with validate_unchanged_weights(model, "a metric"):
        before = model.weight.detach().clone()
        write(model.weight)
        model.load_state_dict({"weight": before}, strict=False)
    with (
        pytest.raises(WeightChanged, match="a metric changes the weight weight"),
        validate_unchanged_weights(model, "a metric"),
    ):
        write(model.weight)


def test_a_counted_write_is_seen_without_comparing_values() -> None:
    model = nn.Linear(2, 2)
    guard = PassGuard(model)
    guard.begin(compares_values=False)
    write_through_data(model.weight)
    guard.validate()
    write_in_place(model.bias)
    with pytest.raises(WeightChanged, match="the weight bias"):
        guard.validate()
