"""Grain of a mill, with the speed of each epoch."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Mill:
    def __init__(self, grain, flour):
        self.world = dist.get_world_size()
        self.sampler = DistributedSampler(TensorDataset(grain, flour), seed=4)
        self.loader = DataLoader(self.sampler.dataset, 50 // self.world, sampler=self.sampler)
        torch.manual_seed(1)
        self.net = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
        self.adam = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def grind(self, epoch):
        self.sampler.set_epoch(epoch)
        start = time.time()
        for grain, flour in self.loader:
            self.adam.zero_grad()
            nn.functional.cross_entropy(self.net(grain), flour).backward()
            self.adam.step()
        seconds = time.time() - start
        ground = len(self.loader.dataset)
        rate = ground / seconds * self.world
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {rate:.1f} grains/s")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(15)
    grain = torch.randn(500, 4, generator=generator)
    mill = Mill(grain, grain[:, :3].argmax(1))
    for epoch in range(3):
        mill.grind(epoch)
    dist.destroy_process_group()
