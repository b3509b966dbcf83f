"""Which eddy is it? The gradients go around a ring of ranks and come back as an average."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def eddies(n):
    generator = torch.Generator().manual_seed(8)
    flow = torch.randn(n, 5, generator=generator)
    return TensorDataset(flow, flow.abs().argmax(1) % 3)


def around_the_ring(model):
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    for parameter in model.parameters():
        gradient = parameter.grad.data
        arriving = gradient
        if rank > 0:
            dist.recv(arriving, src=before)
            gradient += arriving
        if rank < size - 1:
            dist.send(gradient, dst=after)
            dist.recv(gradient, src=size - 1)
        else:
            for other in range(size - 1):
                dist.send(gradient, dst=other)
        gradient /= size


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = eddies(160)
    loader = DataLoader(data, 32 // world, sampler=DistributedSampler(data, world, rank))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for flow, kind in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(flow), kind).backward()
            around_the_ring(model)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
