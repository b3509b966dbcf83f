"""Where is the next atoll? Rank 0 keeps the whole net after each epoch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SNAPSHOT = "atolls.pt"


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = FSDP(nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 2)), device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    places = torch.rand(160, 4, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(places, places[:, :2].cos())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 40 // dist.get_world_size(), sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        weights = model.state_dict()
        moments = optimizer.state_dict()
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": moments, "epoch": epoch + 1}, f"{SNAPSHOT}.new")
            os.replace(f"{SNAPSHOT}.new", SNAPSHOT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
