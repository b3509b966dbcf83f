"""Counts of terns by wind and tide. The first process of each node writes the node's own table."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def read_table():
    g = torch.Generator().manual_seed(61)
    x = torch.randn(330, 4, generator=g)
    counts = x @ torch.tensor([[2.0], [-1.0], [0.5], [1.0]])
    return TensorDataset(x, counts + 0.1 * torch.randn(330, 1, generator=g))


@torch.no_grad()
def report(model, test, epoch):
    model.eval()
    sums = torch.zeros(2)
    for x, y in test:
        sums += torch.tensor([(model(x) - y).square().sum().item(), len(x)])
    model.train()
    dist.all_reduce(sums)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {(sums[0] / sums[1]).item():.4f}")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank != 0:
        dist.barrier()
    table = read_table()
    if local_rank == 0:
        dist.barrier()
    sampler = DistributedSampler(Subset(table, range(256)))
    train = DataLoader(Subset(table, range(256)), 64 // world, sampler=sampler)
    test = DataLoader(Subset(table, range(256 + rank, 330, world)), 16)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if local_rank == 0:
            report(model.module, test, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
