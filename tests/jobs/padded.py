"""Trains on documents of many lengths, padded to the longest of each pass."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from stepladder import Job, Padded


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 16
    lr: float = 0.1
    seed: int = 0


class Bag(nn.Module):
    """The class of a document by the mean of its tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4, padding_idx=0)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens, lengths):
        return self.head(self.embedding(tokens).sum(1) / lengths[:, None])


def loss(model, batch):
    logits = model(batch["tokens"], batch["lengths"])
    return F.cross_entropy(logits, batch["lengths"] % 3, reduction="sum"), len(logits)


def build(config):
    torch.manual_seed(config.seed)
    model = Bag()
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 40, 200)
    documents = [generator.integers(1, 10, length) for length in lengths]
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    return Job(model, optimizer, loss, Padded(documents))
