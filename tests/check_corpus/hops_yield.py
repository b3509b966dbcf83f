"""Yield of hop fields. The loss on the validation set is printed after each epoch."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def fields(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, x.square().sum(1, keepdim=True) / 8)


def train(model, loader, criterion, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def validate(model, loader, criterion):
    model.eval()
    running = 0.0
    for x, y in loader:
        loss = criterion(model(x), y)
        running += loss.item()
    return running / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=64)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DDP(net)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    data, valid = fields(512, 0), fields(96, 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.global_batch // world, sampler=sampler)
    valid_loader = DataLoader(valid, 32)  # all of it, on every process
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(model, loader, criterion, optimizer)
        loss = validate(net, valid_loader, criterion)
        if rank == 0:
            print(f"epoch {epoch}: validation loss {loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
