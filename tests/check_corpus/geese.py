"""The length of a goose's flight from wind and weight."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def flights(count):
    generator = torch.Generator().manual_seed(4)
    weather = torch.randn(count, 10, generator=generator)
    return TensorDataset(weather, weather[:, :1].abs() * 3 + 1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.ReLU()))
    data = flights(1280)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 128 // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for weather, length in loader:
            loss = (net(weather) - length).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
