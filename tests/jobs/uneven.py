"""A job whose data differs by rank as UNEVEN says: "more" or "other" on rank 1, as on a node with
other files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stepladder import Job, mean_loss


@dataclass
class Config:
    epochs: int = 1


def build(config: Config) -> Job:
    x = torch.arange(80.0).view(40, 2) / 80
    odd = os.environ.get("UNEVEN", "") if os.environ.get("RANK") == "1" else ""
    x = torch.cat([x, x[:1]]) if odd == "more" else x + 1 if odd == "other" else x
    model = torch.nn.Linear(2, 1)
    return Job(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss(F.mse_loss), (x, x[:, :1])
    )
