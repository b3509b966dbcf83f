"""A job that streams from shards; or, to compare, from the same rows in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from stepladder import Job, Shards, mean_loss
from stepladder.data.shards.reader import ShardReader


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 24
    lr: float = 0.05
    seed: int = 0
    data_dir: str = "shards"
    memory: bool = False


def build(config: Config) -> Job:
    torch.manual_seed(config.seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    data = Shards(config.data_dir, columns=("x", "y"))
    if config.memory:
        with ShardReader(data) as reader:
            data = tuple(map(torch.from_numpy, reader.read(np.arange(len(data))).values()))  # type: ignore[assignment]

    def metrics(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
        x, y = batch
        return {"error": (F.mse_loss(model(x), y, reduction="sum"), len(y))}

    return Job(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9),
        loss=mean_loss(F.mse_loss),
        train_data=data,
        eval_data=data,
        metrics=metrics,
    )
