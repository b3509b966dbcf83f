"""What does the inkblot show? The loss of logarithms is an object of its own."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def inkblots(n):
    generator = torch.Generator().manual_seed(7)
    blot = torch.randn(n, 9, generator=generator)
    return TensorDataset(blot, blot[:, :3].argmax(1))


class Trainer:
    def __init__(self, rank, world):
        data = inkblots(192)
        self.sampler = DistributedSampler(data, world, rank)
        self.loader = DataLoader(data, 48 // world, sampler=self.sampler)
        torch.manual_seed(0)
        layers = [nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 3), nn.Identity()]
        self.model = DDP(nn.Sequential(*layers))
        self.loss = nn.NLLLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for blot, sight in self.loader:
                self.optimizer.zero_grad()
                self.loss(self.model(blot), sight).backward()
                self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    Trainer(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])).run(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
