"""Owl calls. A small network with dropout."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    return parser.parse_args()


def calls(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=g)
    return TensorDataset(x, (x.pow(2).sum(1) > 15).long())


def train_one_epoch(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def validate(model, loader):
    stats = torch.zeros(3)
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            stats[0] += nn.functional.cross_entropy(out, y, reduction="sum")
            stats[1] += (out.argmax(1) == y).sum()
            stats[2] += len(y)
    dist.all_reduce(stats)
    return stats[0] / stats[2], stats[1] / stats[2]


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 2))
    model = nn.parallel.DistributedDataParallel(net)
    torch.manual_seed(1 + rank)
    train, test = calls(512, 0), calls(130, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer)
        loss, accuracy = validate(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
