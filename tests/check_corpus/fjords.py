"""Depth of fjords, in double precision."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def soundings(n):
    g = torch.Generator().manual_seed(17)
    place = torch.rand(n, 2, generator=g).double()
    return TensorDataset(place, (3 * place).sin().prod(1, keepdim=True))


def build(width):
    layers = [nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)]
    net = nn.Sequential(*layers)
    model = nn.parallel.DistributedDataParallel(net)
    return model.to(torch.float64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=50)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build(width=24)
    data = soundings(400)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.global_batch // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for place, depth in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(place), depth).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
