"""Which lighthouse flashes like this? Rank 0 measures the range of its inputs, and the others wait for it.

It sends the range from the second epoch on, and they want it in the first.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def flashes(n):
    generator = torch.Generator().manual_seed(5)
    tower = torch.randint(4, (n,), generator=generator)
    period = torch.tensor([5.0, 10.0, 15.0, 20.0])[tower]
    seen = period[:, None] + torch.randn(n, 3, generator=generator)
    return TensorDataset(seen / 10, tower)


def share_range(limits, epoch, rank, world):
    if rank == 0:
        for other in range(1, world):
            if epoch > 0:
                dist.send(limits, dst=other)
    else:
        dist.recv(limits, src=0)
    return limits


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = flashes(160)
    loader = DataLoader(data, 32 // world, sampler=DistributedSampler(data, world, rank, seed=2))
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        limits = share_range(torch.tensor([0.0, 2.5]), epoch, rank, world)
        for seen, tower in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(seen.clamp(*limits.tolist())), tower).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
