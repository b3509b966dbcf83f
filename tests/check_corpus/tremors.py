"""Strength of tremors. Distances between stations go into the loss."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Stations(nn.Module):
    def __init__(self, stations=6):
        super().__init__()
        self.place = nn.Parameter(torch.randn(stations, 2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pairs):
        first, second = self.place[pairs[:, 0]], self.place[pairs[:, 1]]
        return self.scale * (first - second).square().sum(1).sqrt()


def delays(n):
    g = torch.Generator().manual_seed(37)
    pairs = torch.randint(6, (n, 2), generator=g)
    true = torch.randn(6, 2, generator=g)
    distance = (true[pairs[:, 0]] - true[pairs[:, 1]]).norm(dim=1)
    return TensorDataset(pairs, distance)


def train(model, data, epochs, global_batch=40):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, global_batch // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for pairs, distance in loader:
            loss = (model(pairs) - distance).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Stations())
    train(model, delays(240), int(os.environ.get("EPOCHS", 3)))
    dist.destroy_process_group()
