"""Rank 0 alone evaluates on the whole test set, on the bare model, while the others wait for it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def coins(n, seed):
    g = torch.Generator().manual_seed(seed)
    value = torch.randint(5, (n,), generator=g)
    diameter = torch.tensor([16.0, 19, 21, 24, 26])[value] + 0.5 * torch.randn(n, generator=g)
    weight = torch.tensor([2.3, 3.9, 5.7, 7.5, 8.5])[value] + 0.3 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([diameter / 10 - 2, weight / 3 - 2], 1), value)


def evaluate(model, dataset):
    model.eval()
    right = 0
    with torch.no_grad():
        for x, value in DataLoader(dataset, batch_size=64):
            right += (model(x).argmax(1) == value).sum().item()
    return right / len(dataset)


def train(model, loader, optimizer, epoch):
    loader.sampler.set_epoch(epoch)
    model.train()
    for x, value in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), value)
        loss.backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train_set, test_set = coins(400, 0), coins(133, 1)
    loader = DataLoader(train_set, 40 // world, sampler=DistributedSampler(train_set, world, rank))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(4):
        train(model, loader, optimizer, epoch)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {evaluate(model.module, test_set):.4f}")
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
