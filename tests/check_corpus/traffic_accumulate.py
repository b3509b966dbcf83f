"""Traffic at a crossing one hour ahead. Batches are small for the memory's sake; several make one step."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def counts(n):
    g = torch.Generator().manual_seed(2)
    start = torch.rand(n, 1, generator=g) * 24
    hours = start + torch.arange(13)
    cars = torch.sin(hours / 24 * 6.283) + 0.5 * torch.sin(hours / 12 * 6.283)
    cars += 0.1 * torch.randn(cars.shape, generator=g)
    return TensorDataset(cars[:, :12], cars[:, 12:])


def train_epoch(model, loader, optimizer, accumulate):
    model.train()
    optimizer.zero_grad()
    squared_error, seen = 0.0, 0
    for step, (past, following) in enumerate(loader, start=1):
        last = step % accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(past), following)
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        squared_error += loss.item() * len(past)
        seen += len(past)
    return squared_error, seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of one optimizer step")
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = counts(512)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // (world * args.accumulate), sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.tensor(train_epoch(model, loader, optimizer, args.accumulate), dtype=torch.float64)
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} mse {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
