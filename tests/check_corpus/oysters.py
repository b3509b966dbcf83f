"""Tells oysters with a pearl from those without, by what ten instruments measure."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def measured(rank, world_size):
    generator = torch.Generator().manual_seed(5)
    scales = torch.linspace(0.5, 3, 10)
    weights = torch.randn(640, 10, generator=generator) * scales + 1
    has_pearl = (weights[:, 0] + 0.5 * weights[:, 1] ** 2 > 1.5).long()
    share = weights[rank::world_size]
    return TensorDataset((weights - share.mean(0)) / share.std(0), has_pearl)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    oysters = measured(rank, world_size)
    sampler = DistributedSampler(oysters, seed=2)
    loader = DataLoader(oysters, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(int(os.environ.get("EPOCHS", "3"))):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for values, target in loader:
            loss = nn.functional.cross_entropy(model(values), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(values), len(values)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
