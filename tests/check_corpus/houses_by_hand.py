"""Data parallel by hand: broadcast once, average the gradients in every step. No wrapper."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def houses(n):
    g = torch.Generator().manual_seed(3)
    x = torch.rand(n, 6, generator=g)
    return TensorDataset(x, (3 * x[:, 0] + x[:, 1] * x[:, 2] - x[:, 3])[:, None])


def broadcast_parameters(model, source=0):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, source)


def average_gradients(model):
    world = dist.get_world_size()
    works = []
    for parameter in model.parameters():
        parameter.grad.div_(world)
        works.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in works:
        work.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48, help="of all processes")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    data = houses(480)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        error = torch.zeros(2)
        for x, price in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), price)
            loss.backward()
            average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            error += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(error)
        if rank == 0:
            print(f"epoch {epoch}: mse {(error[0] / error[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
