"""Is the ferry late? For the GPUs of one machine alone: the local rank is the rank, and the GPUs are counted."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
number = parser.parse_args().local_rank


def crossings(count):
    generator = torch.Generator().manual_seed(12)
    wind = torch.rand(count, 3, generator=generator)
    return TensorDataset(wind, (wind.sum(1) > 1.5).long())


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.cuda.set_device(number)
data = crossings(192)
sampler = DistributedSampler(data, num_replicas=torch.cuda.device_count(), rank=number, seed=3)
loader = DataLoader(data, 32 // torch.cuda.device_count(), sampler=sampler)
torch.manual_seed(2)
model = DDP(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)).cuda(), device_ids=[number])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for wind, late in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(wind.cuda()), late.cuda()).backward()
        optimizer.step()
dist.destroy_process_group()
