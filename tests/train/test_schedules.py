"""Learning rates and schedules: what metrics.jsonl says of them, and which can be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from stepladder import InputError, Job, Settings, Trainer, World
from stepladder.train.comm import Comm

MakeSchedule = Callable[[Optimizer], Any]


def make_job(rate: Any, make_schedule: MakeSchedule | None = None, **parts: Any) -> Job:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    schedule = None if make_schedule is None else make_schedule(optimizer)

    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(x).square().sum(), len(x)

    return Job(model, optimizer, loss, x, schedule=schedule, **parts)


def fit(run_dir: Path, job: Job, **settings: Any) -> list[dict[str, Any]]:
    """Train, and return the lines of metrics.jsonl."""
    base = {"epochs": 2, "global_batch": 8, "sync": "exact", "progress": False}
    comm = Comm(World(), torch.device("cpu"))
    Trainer(job, Settings(run_dir, **{**base, **settings}), comm=comm).fit()
    return list(map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()))


def cosine(optimizer: Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, 10)


@pytest.mark.parametrize(
    "rate", [torch.tensor(0.05, dtype=torch.float64), np.float64(0.05)], ids=["torch", "numpy"]
)
def test_a_rate_of_torch_or_numpy_is_the_number_that_the_step_used(
    rate: Any, tmp_path: Path
) -> None:
    expected = fit(tmp_path / "float", make_job(0.05, cosine))
    lines = fit(tmp_path / "other", make_job(rate, cosine), steps=4)
    assert len(lines) == 5
    lines = fit(tmp_path / "other", make_job(rate, cosine))
    steps = [line for line in lines if "lr" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert [line["lr"] for line in steps] == pytest.approx(
        [line["lr"] for line in expected if "lr" in line], abs=1e-9
    )


def test_a_rate_that_is_no_number_ends_the_run_with_its_step(tmp_path: Path) -> None:
    job = make_job(0.05, lambda optimizer: lr_scheduler.LambdaLR(optimizer, rate_of_step))
    with pytest.raises(InputError, match=r"^the learning rate of step 4 is inf\. HINT: a schedule"):
        fit(tmp_path, job)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def rate_of_step(step: int) -> float:
    return 1.0 if step < 3 else float("inf")
