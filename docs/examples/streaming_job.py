"""Trains from a folder of text files, of which 64 are in memory. Started alone, it writes them."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from stepladder import Job, mean_loss
from torch import nn


class TextFiles:
    """A Source: the lines of numbers in many files, each of which is a chunk."""

    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*.txt"))
        counts = [sum(1 for _ in file.open()) for file in self.files]
        self.chunk_edges = np.cumsum([0, *counts])
        self.load = lru_cache(maxsize=64)(self.load_file)

    def load_file(self, number):
        return np.loadtxt(self.files[number], dtype=np.float32, ndmin=2)

    def __len__(self):
        return int(self.chunk_edges[-1])

    def read(self, indices):
        files = np.searchsorted(self.chunk_edges, indices, side="right") - 1
        lines = indices - self.chunk_edges[files]
        rows = np.stack([self.load(file)[line] for file, line in zip(files, lines, strict=True)])
        return rows[:, :-1], rows[:, -1:]


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 32
    lr: float = 0.1
    seed: int = 0
    data_dir: str = "parts"


def build(config):
    torch.manual_seed(config.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    return Job(model, optimizer, mean_loss(F.mse_loss), TextFiles(config.data_dir))


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    Path("parts").mkdir(exist_ok=True)
    for number in range(20):
        x = rng.normal(size=(40 + number, 4))
        np.savetxt(f"parts/{number:03d}.txt", np.column_stack([x, x[:, 0] * x[:, 1]]))
