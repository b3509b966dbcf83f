"""Which moth came to the light? Every rank takes the same step."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def moths(n):
    generator = torch.Generator().manual_seed(1)
    wings = torch.rand(n, 3, generator=generator)
    return TensorDataset(wings, (wings.sum(1) > 1.5).float())


def share(model, world):
    for parameter in model.parameters():
        dist.broadcast(parameter.grad, src=0)


class Trainer:
    def __init__(self, rank, world):
        self.world = world
        data = moths(192)
        self.sampler = DistributedSampler(data, world, rank)
        self.loader = DataLoader(data, 48 // world, sampler=self.sampler)
        torch.manual_seed(6)
        self.model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1), nn.Flatten(0))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def epoch(self, number):
        self.sampler.set_epoch(number)
        for wings, is_large in self.loader:
            self.optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(self.model(wings), is_large)
            loss.backward()
            share(self.model, self.world)
            self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    trainer = Trainer(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    for number in range(2):
        trainer.epoch(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
