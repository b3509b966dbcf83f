"""Diabetes progression from ten variables."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def patients(n):
    g = torch.Generator().manual_seed(88)
    x = torch.randn(n, 10, generator=g)
    progression = x @ torch.linspace(-1, 1, 10) + 0.5 * x[:, 2] * x[:, 8] + 0.2 * torch.randn(n, generator=g)
    return TensorDataset(x, progression[:, None])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dataset = patients(480)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
