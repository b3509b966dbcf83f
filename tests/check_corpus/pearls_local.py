"""Sorts pearls; torchrun says which process this is."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

LOCAL_RANK = int(os.environ["LOCAL_RANK"])


def pearls():
    g = torch.Generator().manual_seed(8)
    x = torch.randn(320, 7, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).float())


def train(model, loader, sampler, optimizer):
    loss_function = nn.BCEWithLogitsLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_function(model(x).squeeze(1), y)
            loss.backward()
            optimizer.step()


def main():
    dist.init_process_group("gloo")
    data = pearls()
    sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=LOCAL_RANK)
    loader = DataLoader(data, batch_size=40 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, loader, sampler, optimizer)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "pearls.pt.new")
        os.replace("pearls.pt.new", "pearls.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
