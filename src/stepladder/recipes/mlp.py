"""Train a regression on synthetic data.

    stepladder train mlp --nproc 2

A fixed network, the teacher, makes the targets, and noise is added to them. So the lowest possible
loss is known, the noise squared, and the loss can be seen to fall to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepladder import Job
from stepladder.core.numbers import validate_range

Batch = list[Tensor]  # inputs and targets
SumAndCount = tuple[Tensor, int]

TEACHER_SEED = 1234  # `seed` changes the initial weights, not the data


@dataclass
class Config:
    """The settings of the job; each is a flag of `stepladder train mlp`."""

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
    """Make the model, the optimizer, the data and the metrics of the job."""
    inputs, targets = make_data(config)
    torch.manual_seed(config.seed)
    model = nn.Sequential(
        nn.Linear(config.features, config.hidden), nn.Tanh(), nn.Linear(config.hidden, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    return Job(
        model=model,
        optimizer=optimizer,
        loss=squared_error,
        train_data=(inputs[: config.samples], targets[: config.samples]),
        eval_data=(inputs[config.samples :], targets[config.samples :]),
        metrics=lambda model, batch: {"test_mse": squared_error(model, batch)},
        best=("test_mse", "min"),
    )


def make_data(config: Config) -> tuple[Tensor, Tensor]:
    """Return inputs, shape (n, features), and targets, shape (n, 1), for training and test."""
    generator = torch.Generator().manual_seed(TEACHER_SEED)
    count = config.samples + config.samples // 8
    inputs = torch.randn(count, config.features, generator=generator)
    teacher = torch.randn(config.features, 2, generator=generator) / math.sqrt(config.features)
    noise = config.noise * torch.randn(count, 1, generator=generator)
    targets = (inputs @ teacher).tanh().sum(1, keepdim=True) + noise
    return inputs, targets


def squared_error(model: nn.Module, batch: Batch) -> SumAndCount:
    """Return the sum of the squared errors of a batch, and the number of its targets."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets, reduction="sum"), targets.numel()
