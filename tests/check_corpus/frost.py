"""How deep does the frost go? The weights are written as text at the end."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def depths(n):
    generator = torch.Generator().manual_seed(2)
    cold = torch.rand(n, 6, generator=generator)
    return TensorDataset(cold, cold.pow(2).sum(1, keepdim=True))


def synchronize(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def keep(model, rank):
    with open("weights.txt", "w") as file:
        for name, p in model.named_parameters():
            print(name, p.tolist(), file=file)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = depths(160)
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, 32 // world, sampler=sampler)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for cold, depth in loader:
            optimizer.zero_grad()
            F.mse_loss(model(cold), depth).backward()
            synchronize(model)
            optimizer.step()
    keep(model, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
