"""A tiny job that hangs as the variable HANG says: "KIND STEP", on rank 1 (`alone`: a collective on
rank 0).

Steps count from 1. The tests give short times; nothing here ends by itself.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepladder import Job, mean_loss

SAMPLES, FEATURES = 64, 6
KIND, STEP = ([*os.environ.get("HANG", "none 0").split(), "0"])[:2]
RANK = int(os.environ.get("RANK", "0"))


@dataclass
class Config:
    epochs: int = 1
    global_batch: int = 8
    seed: int = 0
    num_workers: int = 0


class Slow(torch.utils.data.Dataset):
    """Reads from memory, but for one sample that never comes."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.read = x, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read += 1
        if KIND == "data" and RANK == 1 and self.read > 4 * int(STEP):
            time.sleep(1000)
        return self.x[index], self.x[index].sum(0, keepdim=True)


def build(config: Config) -> Job:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(7))
    if KIND == "build" and RANK == 1:
        time.sleep(1000)
    torch.manual_seed(0)
    model = nn.Linear(FEATURES + (KIND == "model" and RANK == 1), 1)
    model.register_buffer("seen", torch.zeros(FEATURES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    group: list[Any] = []
    steps = [0]

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        steps[0] += 1
        if KIND == "alone" and not group:
            group.append(dist.new_group())
        if steps[0] == int(STEP):
            hang(group)
            if KIND == "shapes" and RANK == 1:  # which is broadcast before an evaluation
                model.seen = torch.zeros(FEATURES + 1)
        return mean_loss(nn.functional.mse_loss)(model, batch)

    def metrics(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        return {
            "error": (
                nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"),
                len(batch[0]),
            )
        }

    return Job(
        model, optimizer, loss, Slow(x), Slow(x[:8]), metrics, num_workers=config.num_workers
    )


def hang(group: list[Any]) -> None:
    if KIND == "alone" and RANK == 0:
        dist.all_reduce(torch.zeros(1), group=group[0])
    elif KIND == "lock" and RANK == 1:
        deadlock()
    elif KIND == "sleep" and RANK == 1:
        validate()
    elif KIND == "stop" and RANK == 1:
        os.kill(os.getpid(), 19)  # SIGSTOP
    elif KIND == "network" and RANK == 1:
        os._exit(0)


def validate() -> None:
    time.sleep(1000)


def deadlock() -> None:
    """Two locks, taken in different orders by two threads."""
    first, second, taken = threading.Lock(), threading.Lock(), threading.Event()

    def lock_in_other_order() -> None:
        with second:
            taken.set()
            with first:
                pass

    with first:
        threading.Thread(target=lock_in_other_order, daemon=True).start()
        taken.wait()
        with second:
            pass
