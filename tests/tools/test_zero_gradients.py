"""A bias before batch norm has a gradient that is only rounding: two runs that round differently are
not told to diverge.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepladder.storage.snapshot_store import Snapshots
from stepladder.tools.verify.trial import compare_snapshots

TOLERANCE = 1e-5
STEP = 5


def train(folder: Path, optimizer: str, reverse: bool = False, scale: float = 1.0) -> Path:
    """Return the snapshot of a short training, whose samples may be added in reverse order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(64, 6)
    y = torch.arange(64) % 3
    if reverse:
        x = x.flip(0)
        y = y.flip(0)
    optimizers = {
        "adam": torch.optim.Adam(model.parameters(), 1e-3),
        "sgd": torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    }
    for _ in range(STEP):
        optimizers[optimizer].zero_grad()
        (scale * F.cross_entropy(model(x), y)).backward()
        optimizers[optimizer].step()
    snapshots = Snapshots(folder)
    snapshots.save(STEP, model, {"optimizer": optimizers[optimizer].state_dict()}, {"ledger": ""})
    snapshots.wait()
    return folder / f"step_{STEP:08}"


@pytest.mark.parametrize(("optimizer", "state"), [("sgd", "momentum_buffer"), ("adam", "exp_avg")])
def test_rounding_of_a_zero_gradient_is_named_and_counts_as_equal(
    optimizer: str, state: str, tmp_path: Path
) -> None:
    first = train(tmp_path / "first", optimizer)
    second = train(tmp_path / "second", optimizer, reverse=True)
    comparison = compare_snapshots(first, second, TOLERANCE)
    assert comparison.differing == []
    assert f"{state} of parameter 1" in comparison.of_zero_gradient
    exact = compare_snapshots(first, second, 0.0)
    assert exact.differing and exact.of_zero_gradient == []


def test_another_gradient_is_no_rounding(tmp_path: Path) -> None:
    first = train(tmp_path / "first", "sgd")
    second = train(tmp_path / "second", "sgd", scale=1.01)
    comparison = compare_snapshots(first, second, TOLERANCE)
    assert "momentum_buffer of parameter 0" in [tensor.name for tensor in comparison.differing]
    assert comparison.of_zero_gradient == []
