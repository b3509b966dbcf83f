"""Healthy or not? A convolutional net on pictures of cells, which are big: few fit into a batch."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Cells(Dataset):
    def __init__(self, n, size=32):
        self.n, self.size = n, size
        axis = torch.linspace(-1, 1, size)
        self.radius = (axis[:, None] ** 2 + axis[None, :] ** 2).sqrt()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ill = i % 2
        wall = 0.5 + 0.2 * torch.rand((), generator=g)
        cell = (self.radius < wall).float() * (0.6 if ill else 1.0) + ill * (self.radius < 0.2).float()
        return (cell + 0.2 * torch.randn(self.size, self.size, generator=g))[None], ill


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class CellNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(block(1, 8), block(8, 16), block(16, 16))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4, help="per process: pictures are big")
    parser.add_argument("--lr", type=float, default=2e-3, help="for one process")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = Cells(96)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(CellNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * world, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        stats = torch.zeros(2)
        for x, ill in loader:
            loss = nn.functional.cross_entropy(model(x), ill)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {(stats[0] / stats[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
