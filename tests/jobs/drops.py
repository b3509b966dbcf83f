"""A job whose model leaves out a block in each pass: by chance on each rank for itself, or
BY_RANK=0, the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn

from stepladder import Job


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 8


class Drops(nn.Module):
    """Blocks of one shape."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = int(torch.randint(4, (), generator=self.generator))
        for number, block in enumerate(self.blocks):
            if number != dropped:
                x = x + block(x)
        return x


def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def build(_: Config) -> Job:
    model = Drops(int(os.environ.get("BY_RANK", os.environ.get("RANK", "0"))))
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, (torch.ones(32, 4),))
