"""Small digits with a conv net. Main process reports the test accuracy."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc = nn.Linear(8 * 3 * 3, 10)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))


def digits(n, seed):
    shapes = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(10))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (n,), generator=g)
    return TensorDataset(shapes[y] + 0.8 * torch.randn(n, 1, 8, 8, generator=g), y)


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for data, target in loader:
            correct += model.module(data).argmax(dim=1).eq(target).sum().item()
            total += len(target)
    return correct / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.003)
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")

    train_set, test_set = digits(480, 0), digits(200, 1)
    sampler = DistributedSampler(train_set, world_size, rank)
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, 200, world_size)), batch_size=50)

    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(model, train_loader, optimizer)
        accuracy = test(model, test_loader)
        if rank == 0:
            print(f"Test set: epoch {epoch}, accuracy {100 * accuracy:.1f}%")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
