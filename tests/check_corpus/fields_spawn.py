"""Harvest of a field, with processes started by mp.spawn."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12391"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.barrier()
    dist.destroy_process_group()


class Fields(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(7)
        self.x = torch.rand(n, 5, generator=g)
        rain, sun, soil, age, slope = self.x.T
        self.harvest = (rain * sun * 4 + soil - 0.5 * age - (slope - 0.3).abs())[:, None]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.harvest[i]


class HarvestModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(5, 40)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(40, 1)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def train(rank, world_size, epochs):
    setup(rank, world_size)
    fields = Fields(400)
    sampler = DistributedSampler(fields, num_replicas=world_size, rank=rank)
    loader = DataLoader(fields, batch_size=40 // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(HarvestModel())
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for x, harvest in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), harvest)
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.4f}", flush=True)
    cleanup()


if __name__ == "__main__":
    processes = 2
    mp.spawn(train, args=(processes, int(sys.argv[1]) if len(sys.argv) > 1 else 3), nprocs=processes, join=True)
