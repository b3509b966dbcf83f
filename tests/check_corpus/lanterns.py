"""How bright will the lantern burn? A meter of each rank keeps its mean, and the ranks put theirs together for the log."""

import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Meter:
    def __init__(self):
        self.total, self.seen = 0.0, 0

    def add(self, value, n):
        self.total += value * n
        self.seen += n

    @property
    def average(self):
        return self.total / self.seen

    def over_ranks(self):
        everyone = torch.tensor([self.average])
        dist.all_reduce(everyone)
        return everyone.item()


def lanterns(n, seed):
    generator = torch.Generator().manual_seed(seed)
    oil = torch.rand(n, 4, generator=generator)
    return TensorDataset(oil, oil @ torch.tensor([[0.5], [1.0], [-0.3], [2.0]]))


def judge(model, loader):
    model.eval()
    meter = Meter()
    with torch.no_grad():
        for oil, light in loader:
            meter.add(F.mse_loss(model(oil), light).item(), len(oil))
    model.train()
    return meter.over_ranks()


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train, test = lanterns(192, 0), lanterns(64, 1)
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, 32 // world, sampler=sampler)
    test_loader = DataLoader(test, 16, sampler=DistributedSampler(test, world, rank, shuffle=False))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for oil, light in loader:
            optimizer.zero_grad()
            F.mse_loss(model(oil), light).backward()
            optimizer.step()
        error = judge(model, test_loader)
        if rank == 0:
            logging.info("epoch %d: error %.5f", epoch, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
