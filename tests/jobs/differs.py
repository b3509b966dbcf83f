"""A small job for pairs of runs that differ in one thing. benchmarks/diff_plants.py changes a line
of it.

`PLANT` in the environment plants what neither the settings nor this file say.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from stepladder import Job, Plan
from stepladder.core.plan import Span

PLANT, STEP, PASSES = os.environ.get("PLANT", ""), 5, 8  # in step 5; passes of a step
WIDE = torch.linspace(-1, 1.1, 200_001)  # enough for threads to share its sum


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 16
    lr: float = 0.05
    seed: int = 0
    dropout: float = 0.1
    data_dir: str = "data"


def is_compared() -> bool:
    """Tell whether the loss is one that --sync exact computes once more, to compare it."""
    stack = traceback.walk_stack(None)
    return any(frame.f_code.co_name == "_recompute" for frame, _ in stack)


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(6, 16), nn.Tanh()
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(16, 1)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.plant()
        x = x * (1 + WIDE.sum() / 1e6)
        x = self.act(self.first(x))
        x = self.drop(x)
        return self.last(x)

    def plant(self) -> None:
        """What no record tells of: one bit of a weight, one microbatch's gradient."""
        if is_compared():
            return
        step, number = divmod(self.passes, PASSES)
        self.passes += 1
        # Not in an epoch's first step, which --sync exact compares the weights of.
        if PLANT == "weight" and (step, number) == (STEP, 0):
            self.first.weight.data.view(torch.int32)[3, 2] ^= 1 << 22
        if PLANT == "gradient" and (step, number) == (STEP - 1, 2):
            self.last.weight.register_hook(
                lambda grad: -grad if self.passes == PASSES * (STEP - 1) + 3 else grad
            )


def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    total = F.mse_loss(model(x), y, reduction="sum")
    return total, len(x)


def other_order(plan: Plan, step: int, spans: Iterable[Span]) -> Iterator[tuple[int, object]]:
    """In one step the next sample in place of each."""
    for epoch, indices in PLANNED(plan, step, spans):
        yield epoch, (indices + 1) % plan.num_samples if step == STEP - 1 else indices


PLANNED = Plan.requests
if PLANT == "order":
    Plan.requests = other_order


def build(config: Config) -> Job:
    x, y = torch.load(Path(config.data_dir) / "data.pt")
    torch.manual_seed(config.seed)
    model = Net(config.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    return Job(model, optimizer, loss, (x, y))
