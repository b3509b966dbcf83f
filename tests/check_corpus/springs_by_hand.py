"""Fit the stiffness of springs; the gradients are averaged by hand, the norm is kept below a limit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MAX_NORM = 0.5


def springs(n=384):
    g = torch.Generator().manual_seed(31)
    x = torch.rand(n, 3, generator=g)
    force = x[:, :1] * 2.5 - x[:, 1:2] ** 2 + 0.3 * torch.sin(6 * x[:, 2:])
    return TensorDataset(x, force + 0.01 * torch.randn(n, 1, generator=g))


def train_step(model, optimizer, x, force, world_size):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), force)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
    return loss.item() * len(x)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    data = springs()
    sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=31)
    loader = DataLoader(data, batch_size=32 // world_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, force in loader:
            total += train_step(model, optimizer, x, force, world_size)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total.item() / len(data):.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
