"""Data parallel without a wrapper: after backward, the gradients are averaged with all_reduce."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 100


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


def spirals(n):
    g = torch.Generator().manual_seed(SEED)
    label = torch.randint(2, (n,), generator=g)
    radius = torch.rand(n, generator=g)
    angle = 4 * radius + 3.1416 * label
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return TensorDataset(points + 0.02 * torch.randn(n, 2, generator=g), label)


def run(rank, size):
    torch.manual_seed(SEED + rank)
    data = spirals(400)
    sampler = DistributedSampler(data, size, rank, shuffle=True, seed=SEED)
    loader = DataLoader(data, batch_size=40 // size, sampler=sampler)
    model = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(1)
        for points, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), label)
            loss.backward()
            average_gradients(model)
            optimizer.step()
            epoch_loss += loss.item() * len(label)
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch}: {epoch_loss.item() / len(data):.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        run(dist.get_rank(), dist.get_world_size())
        dist.barrier()
    finally:
        dist.destroy_process_group()
