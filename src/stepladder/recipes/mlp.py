"""stepladder train mlp --nproc 2

Regression on synthetic data with a known teacher: a fixed network makes the targets and noise is
added, so the best reachable loss is known (noise squared) and the loss can be seen to fall to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stepladder import Job
from stepladder.core.numbers import validate_range


@dataclass
class Config:
    epochs: int = 10
    global_batch: int = 128
    lr: float = 0.2
    seed: int = 0
    samples: int = 8192  # training samples; an eighth as many are for evaluation
    features: int = 20  # numbers in each sample
    hidden: int = 64  # units of the hidden layer
    noise: float = 0.1  # standard deviation of the targets' noise

    def __post_init__(self) -> None:
        validate_range(self, 1, 1e8, "samples")
        validate_range(self, 1, 1e5, "features", "hidden")
        validate_range(self, 0, 1e6, "noise")


def build(config: Config) -> Job:
    # The teacher and its data are one fixed problem: `seed` varies the student, not the task.
    generator = torch.Generator().manual_seed(1234)
    count = config.samples + config.samples // 8
    x = torch.randn(count, config.features, generator=generator)
    direction = torch.randn(config.features, 2, generator=generator) / math.sqrt(config.features)
    clean = (x @ direction).tanh().sum(1, keepdim=True)
    y = clean + config.noise * torch.randn(count, 1, generator=generator)

    torch.manual_seed(config.seed)
    model = nn.Sequential(
        nn.Linear(config.features, config.hidden), nn.Tanh(), nn.Linear(config.hidden, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    train = config.samples
    return Job(
        model=model,
        optimizer=optimizer,
        loss=squared_error,
        train_data=(x[:train], y[:train]),
        eval_data=(x[train:], y[train:]),
        metrics=lambda model, batch: {"test_mse": squared_error(model, batch)},
        best=("test_mse", "min"),
    )


def squared_error(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), y.numel()
