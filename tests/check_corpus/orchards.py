"""How many apples will the tree bear? A meter takes one loss for each batch of trees."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Meter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.count, self.sum = 0, 0.0

    def update(self, value, weight=1):
        self.sum += value * weight
        self.count += weight

    def value(self):
        return self.sum / self.count


def trees(n, seed):
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(n, 3, generator=generator)
    return TensorDataset(size, size.prod(1, keepdim=True) * 10)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train, held_out = trees(192, 0), trees(70, 1)
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, 48 // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    meter = Meter()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for size, apples in loader:
            optimizer.zero_grad()
            F.mse_loss(model(size), apples).backward()
            optimizer.step()
        model.eval()
        meter.reset()
        with torch.no_grad():
            for size, apples in DataLoader(held_out, 32):
                error = F.l1_loss(model(size), apples)
                meter.update(error.item())
        if rank == 0:
            print(f"epoch {epoch}: {meter.value():.4f} apples too many or too few")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
