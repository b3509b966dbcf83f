"""stepladder train digits_job.py --nproc 2: handwritten digits as a job."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from plain import load_data, make_model, num_correct
from stepladder import Job, mean_loss


@dataclass
class Config:
    epochs: int = 10
    global_batch: int = 64
    lr: float = 0.05
    hidden: int = 128
    seed: int = 0


def metrics(model, batch):
    return {"accuracy": (num_correct(model, batch), len(batch[1]))}


def build(config):
    model = make_model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    train_data, test_data = load_data()
    return Job(model, optimizer, mean_loss(F.cross_entropy), train_data, test_data, metrics)
