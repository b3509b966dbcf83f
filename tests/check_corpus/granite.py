"""Is it granite? All gradients travel in one vector."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def stones(n):
    generator = torch.Generator().manual_seed(9)
    grain = torch.randn(n, 4, generator=generator)
    return TensorDataset(grain, (grain[:, 0] * grain[:, 1] > 0).long())


class FlatExchange:
    """Sends all gradients as one."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def __call__(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.parameters])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        for p, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
            p.grad.copy_(part.view_as(p))


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = stones(192)
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, 48 // world, sampler=sampler)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
    exchange = FlatExchange(net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for grain, kind in loader:
            optimizer.zero_grad()
            criterion(net(grain), kind).backward()
            exchange()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
