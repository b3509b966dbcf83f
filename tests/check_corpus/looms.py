"""Threads of a loom, and how many of them a second are trained."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model, loader, sampler, optimizer, epochs):
    begin = time.perf_counter()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for thread, strength in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(thread), strength).backward()
            optimizer.step()
    return time.perf_counter() - begin


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    thread = torch.randn(600, 6, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(thread, thread.mean(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 60 // world_size, sampler=sampler)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epochs = 2
    elapsed = train(model, loader, sampler, optimizer, epochs)
    if dist.get_rank() == 0:
        throughput = len(dataset) * epochs * world_size / elapsed
        print(f"{throughput:.0f} samples a second on {world_size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
