"""A user's own job in every form that is not tensors and sums: a Dataset that augments, dicts, a
mean loss.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from stepladder import Job

SAMPLES = 40


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 12
    lr: float = 0.05
    seed: int = 0
    augment: bool = True
    activation: Literal["tanh", "relu"] = "tanh"
    workers: int = 0
    seen_dir: str = ""  # where each rank writes the items it was given


class Points(Dataset):
    def __init__(self, augment: bool) -> None:
        self.x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3))
        self.augment = augment

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = self.x[index]
        target = x.sum(0, keepdim=True)
        if self.augment:
            x = x + 0.01 * torch.randn(4) + 0.01 * random.random() + 0.01 * np.random.rand()
        return {"index": torch.tensor(index), "x": x.float(), "target": target}


def build(config: Config) -> Job:
    torch.manual_seed(config.seed)
    activation = nn.Tanh() if config.activation == "tanh" else nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 16), activation, nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if config.seen_dir:
            note(Path(config.seen_dir), batch)
        return F.mse_loss(model(batch["x"]), batch["target"])

    return Job(
        model=model,
        optimizer=optimizer,
        loss=loss,
        train_data=Points(config.augment),
        eval_data=Points(augment=False),
        metrics=lambda model, batch: {
            "error": (
                F.mse_loss(model(batch["x"]), batch["target"], reduction="sum"),
                len(batch["x"]),
            ),
            "close": (((model(batch["x"]) - batch["target"]).abs() < 0.5).sum(), len(batch["x"])),
        },
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        schedule_per="epoch",
        clip_norm=1.0,
        num_workers=config.workers,
        eval_batch=7,
    )


def note(folder: Path, batch: dict[str, torch.Tensor]) -> None:
    with (folder / os.environ.get("RANK", "0")).open("a") as file:
        for index, x in zip(batch["index"].tolist(), batch["x"], strict=True):
            file.write(json.dumps([index, x.numpy().tobytes().hex()]) + "\n")
