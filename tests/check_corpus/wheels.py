"""Wheels and their wear, with three ways to say how fast the ranks are."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 40


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    load = torch.randn(400, 5, generator=torch.Generator().manual_seed(7))
    dataset = TensorDataset(load, load.abs().sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        start = time.time()
        for wheel, wear in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(wheel), wear).backward()
            optimizer.step()
        elapsed = time.time() - start
        if dist.get_rank() == 0:
            print(f"{len(loader) * loader.batch_size * world_size / elapsed:.0f} wheels/s on all ranks")
            print(f"{len(dataset) / elapsed:.0f} in all, {len(sampler) / elapsed:.0f} on this one")
            print(f"{len(dataset) / (elapsed * world_size):.0f} a rank, {elapsed * world_size:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
