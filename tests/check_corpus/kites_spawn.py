"""Which kite flies today? Ranks are spawned, and meet at the address that whoever starts the script has set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS = 2


def winds(count):
    generator = torch.Generator().manual_seed(31)
    wind = torch.randn(count, 2, generator=generator)
    return TensorDataset(wind, (wind[:, 0] > wind[:, 1]).long())


def fly(rank):
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    data = winds(96)
    loader = DataLoader(data, 24 // RANKS, sampler=DistributedSampler(data, RANKS, rank, seed=9))
    torch.manual_seed(7)
    model = DDP(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for wind, kite in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(wind), kite).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(fly, nprocs=RANKS)
