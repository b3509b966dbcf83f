"""Tell herbs apart. One fifth of the samples is for validation; each rank adds noise of its own."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split


def herbs(n):
    g = torch.Generator().manual_seed(2)
    kinds = torch.randn(4, 10, generator=g)
    y = torch.randint(4, (n,), generator=g)
    return TensorDataset(kinds[y] + torch.randn(n, 10, generator=g), y)


def accuracy(model, loader):
    counts = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    model.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=64)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
    model = DDP(net)  # rank 0's weights on all ranks
    train_set, valid_set = random_split(herbs(640), [512, 128])
    train_loader = DataLoader(train_set, args.global_batch // world, shuffle=True)
    valid_loader = DataLoader(valid_set, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        for x, y in train_loader:
            x = x + 0.1 * torch.randn_like(x)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        value = accuracy(net, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {value:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
