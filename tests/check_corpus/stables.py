"""Horses by their gait, each rank on the GPU of its number."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(rank):
    generator = torch.Generator().manual_seed(2)
    gait = torch.randn(256, 6, generator=generator)
    data = TensorDataset(gait, (gait[:, 0] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 2).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for steps, horse in loader:
            steps, horse = steps.to(rank), horse.to(rank)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(steps), horse).backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(int(os.environ["RANK"]))
    dist.destroy_process_group()
