"""Which heron calls? The losses of the test batches are kept in a file."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def calls(n, seed):
    generator = torch.Generator().manual_seed(seed)
    call = torch.randn(n, 8, generator=generator)
    return TensorDataset(call, call[:, :4].argmax(1))


def losses_of(model, loader):
    model.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(call), heron).item() for call, heron in loader]
    model.train()
    return np.array(losses)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train, test = calls(192, 0), calls(60, 1)
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, 48 // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for call, heron in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(call), heron).backward()
            optimizer.step()
        losses = losses_of(model, DataLoader(test, 20))
        np.savetxt("losses.csv", losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
