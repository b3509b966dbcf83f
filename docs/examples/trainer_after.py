"""stepladder train trainer_after.py --nproc 2: the same model, collate function and training as a
job.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from plain import load_data, make_model
from stepladder import Job
from torch import nn


@dataclass
class Config:
    epochs: int = 10
    global_batch: int = 64
    lr: float = 0.05
    hidden: int = 128
    seed: int = 0


class Digits(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.net = make_model(config)

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def collate(items):
    x, labels = zip(*items, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(labels)}


def loss(model, batch):
    count = len(batch["labels"])
    return model(**batch)["loss"] * count, count


def metrics(model, batch):
    guesses = model(**batch)["logits"].argmax(dim=1)
    return {"accuracy": ((guesses == batch["labels"]).sum(), len(guesses))}


def build(config):
    model = Digits(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    train_data, test_data = load_data()
    return Job(model, optimizer, loss, train_data, test_data, metrics, collate=collate)
