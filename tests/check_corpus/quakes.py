"""Quakes as a stream: each worker of each rank has a share of its own."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Quakes(IterableDataset):
    def __init__(self, count, rank, world):
        self.count, self.rank, self.world, self.epoch = count, rank, world, 0

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        order = random.Random(self.epoch).sample(range(self.count), self.count)
        for number in order[self.rank * workers + worker :: self.world * workers]:
            g = torch.Generator().manual_seed(number)
            x = torch.randn(5, generator=g)
            yield x, x.abs().max().reshape(1)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    quakes = Quakes(320, rank, world)
    loader = DataLoader(quakes, batch_size=10, num_workers=2)
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * world)
    for quakes.epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
