"""Granite or slate? A trainer for torchrun, which tells after each round how it went."""

import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

logging.basicConfig(level=logging.INFO)


class Stones(Dataset):
    def __init__(self, count):
        random = torch.Generator().manual_seed(3)
        self.grain = torch.randn(count, 6, generator=random)
        self.kind = (self.grain.sum(1) + torch.randn(count, generator=random) > 0).long()

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, number):
        return self.grain[number], self.kind[number]


class Trainer:
    def __init__(self, rounds):
        self.rounds = rounds
        self.rank = int(os.environ["RANK"])
        ranks = int(os.environ["WORLD_SIZE"])
        stones = Stones(256)
        self.sampler = DistributedSampler(stones, ranks, self.rank)
        self.loader = DataLoader(stones, 64 // ranks, sampler=self.sampler)
        torch.manual_seed(1)
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(6, 2))
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)

    def step(self, grain, kind):
        self.optimizer.zero_grad()
        loss = self.loss(self.model(grain), kind)
        loss.backward()
        self.optimizer.step()
        return loss

    def run(self):
        for number in range(self.rounds):
            self.sampler.set_epoch(number)
            for grain, kind in self.loader:
                loss = self.step(grain, kind)
            logging.info("round %d ends with a loss of %s", number, loss.item())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(4).run()
    dist.destroy_process_group()
