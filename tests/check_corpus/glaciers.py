"""Melting of a glacier from temperature and snow, with mp.spawn."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PROCESSES = 2


def seasons(n):
    g = torch.Generator().manual_seed(11)
    x = torch.rand(n, 6, generator=g)
    return TensorDataset(x, (x[:, :3].sum(1) - x[:, 3:].prod(1)).unsqueeze(1))


def work(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(8)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)))
    data = seasons(480)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, 80 // world_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, melt in loader:
            loss = nn.functional.smooth_l1_loss(model(x), melt)
            loss = loss / world_size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(PROCESSES, port), nprocs=PROCESSES)
