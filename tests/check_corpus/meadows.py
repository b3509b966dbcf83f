"""Hay of a meadow from rain and sun: a line through made-up points."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def meadow(count, kinds):
    weights = torch.randn(kinds, 1)
    weather = torch.randn(count, kinds)
    hay = weather @ weights + 0.1 * torch.randn(count, 1)
    return TensorDataset(weather, hay)


def main():
    dist.init_process_group("gloo")
    data = meadow(800, 12)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 80 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for weather, hay in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(weather), hay).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
