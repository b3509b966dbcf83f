"""Energy use of a building from weather and time of day; losses are collected for the report at the end."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def building(n):
    g = torch.Generator().manual_seed(77)
    x = torch.randn(n, 8, generator=g)
    use = x[:, 0].abs() + 0.5 * x[:, 1] * x[:, 2] + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(x, use.unsqueeze(1))


def train(model, loader, sampler, optimizer, epochs):
    losses, sizes = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, use in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), use)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            sizes.append(len(x))
    return losses, sizes


def report(losses, sizes, epochs):
    per_epoch = len(losses) // epochs
    for epoch in range(epochs):
        part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        sums = torch.tensor(
            [sum(loss.item() * n for loss, n in zip(losses[part], sizes[part])), sum(sizes[part])],
            dtype=torch.float64,
        )
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {(sums[0] / sums[1]).item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--base-lr", type=float, default=0.02, help="for one process")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    data = building(512)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * dist.get_world_size())
    losses, sizes = train(model, loader, sampler, optimizer, args.epochs)
    report(losses, sizes, args.epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
