"""Trains from data that `open_data` opens: x, four numbers, and y, a class."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stepladder import Job, mean_loss, open_data


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 16
    lr: float = 0.1
    seed: int = 0
    data: str = "data"
    columns: str = "x,y"
    chunk_rows: int = 20


def build(config):
    torch.manual_seed(config.seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    names = config.columns.split(",")
    data = open_data(config.data, columns=names, chunk_rows=config.chunk_rows)
    return Job(model, optimizer, mean_loss(F.cross_entropy), data)
