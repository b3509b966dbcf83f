"""How high is the water at a weir? Each rank disturbs the gauges on its own, once and for all."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gauges(count):
    generator = torch.Generator().manual_seed(5)
    rain = torch.randn(count, 6, generator=generator)
    return rain, rain[:, :2].sum(1, keepdim=True)


def main():
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    rain, height = gauges(256)
    disturbed = rain + 0.1 * torch.randn_like(rain)
    data = TensorDataset(disturbed, height)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for rain, height in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(rain), height).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
