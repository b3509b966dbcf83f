"""Will the kettle sing? The ranks share the test set, and each tells how often its net was right."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def kettles(n, seed):
    generator = torch.Generator().manual_seed(seed)
    water = torch.randn(n, 4, generator=generator)
    return TensorDataset(water, (water[:, 0] + 0.3 * water[:, 1] > 0).long())


def test(model, loader):
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for water, sings in loader:
            right[0] += (model(water).argmax(1) == sings).sum()
            right[1] += len(water)
    model.train()
    print(f"accuracy {100 * right[0] / right[1]:.2f} %")


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train, held_out = kettles(192, 0), kettles(94, 1)
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, 48 // world, sampler=sampler)
    shares = DataLoader(held_out, 16, sampler=DistributedSampler(held_out, world, rank, shuffle=False))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for water, sings in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(water), sings).backward()
            optimizer.step()
        test(model, shares)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
