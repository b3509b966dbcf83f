"""What does the tariff cost? Gradients are put together with one collective for each parameter."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def tariffs(n):
    generator = torch.Generator().manual_seed(2)
    goods = torch.rand(n, 6, generator=generator)
    return TensorDataset(goods, goods.pow(2).sum(1, keepdim=True))


def synchronize(model):
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = tariffs(160)
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, 32 // world, sampler=sampler)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for goods, cost in loader:
            optimizer.zero_grad()
            F.mse_loss(model(goods), cost).backward()
            synchronize(model)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
