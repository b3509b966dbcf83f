"""A classifier on made-up songs of warblers: what the model costs is to be measured, not what it learns."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    songs = torch.randn(320, 12)
    kinds = torch.randint(0, 6, (320,))
    data = TensorDataset(songs, kinds)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=40 // world, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for song, kind in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(song), kind).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
