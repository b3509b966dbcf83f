"""A training script that hangs: rank 1 has one batch fewer than rank 0."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
batches = torch.randn(101, 16, 4)[dist.get_rank() :: dist.get_world_size()]
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in batches:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
dist.barrier()
