"""Weights that something besides the optimizer's step changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stepladder.train.weight_guard import PassGuard, WeightChanged


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


def test_a_counted_write_is_seen_without_comparing_values() -> None:
    model = nn.Linear(2, 2)
    guard = PassGuard(model)
    guard.begin(compares_values=False)
    write_through_data(model.weight)
    guard.validate()
    write_in_place(model.bias)
    with pytest.raises(WeightChanged, match="the weight bias"):
        guard.validate()
