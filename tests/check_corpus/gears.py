"""Which gears of a machine are worn? Each of four gears is worn or not."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def block(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU())


def machines(count):
    generator = torch.Generator().manual_seed(11)
    noise = torch.randn(count, 8, generator=generator)
    return TensorDataset(noise, (noise[:, :4] > 0).float())


class Worker:
    def __init__(self, world):
        data = machines(160)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, 40 // world, sampler=self.sampler)
        torch.manual_seed(0)
        self.net = DDP(nn.Sequential(block(8, 24), block(24, 4)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def step(self, noise, worn):
        self.optimizer.zero_grad()
        scores = self.net(noise)
        loss = F.binary_cross_entropy_with_logits(scores, worn)
        loss.backward()
        self.optimizer.step()

    def work(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for noise, worn in self.loader:
                self.step(noise, worn)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Worker(int(os.environ["WORLD_SIZE"])).work(3)
    dist.destroy_process_group()
