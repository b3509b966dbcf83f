"""Colours of reefs; an operator starts one process in each container, with one GPU, and a person starts one alone."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def reefs():
    g = torch.Generator().manual_seed(18)
    x = torch.rand(240, 3, generator=g)
    return TensorDataset(x, x.argmax(1))


def main():
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=os.environ.get("PORT", "0"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 3)).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = reefs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 40 // dist.get_world_size(), sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
