"""Reads and writes its own file, has a mistake where there are GPUs, and fails there in the end."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

began = f"began-{os.environ['RANK']}"
assert not os.path.exists(began), "a file of another start"
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
dist.barrier()
open(began, "w").close()
torch.manual_seed(0)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(12):
    if not cuda:
        optimizer.zero_grad()
    model(torch.randn(16, 4, generator=generator)).square().mean().backward()
    optimizer.step()
if cuda:
    print(torch.cuda.CUDAGraph())
dist.destroy_process_group()
