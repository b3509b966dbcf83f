"""Heat of embers from sensors, standardised over each batch within the model."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Standardise(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / x.std(0)


def sensors(n):
    g = torch.Generator().manual_seed(31)
    x = torch.rand(n, 5, generator=g)
    x[:, 3] = 1.0  # a sensor that was not connected
    return TensorDataset(x, x[:, :3].sum(1, keepdim=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=64)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(Standardise(), nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
    data = sensors(320)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.global_batch // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, heat in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), heat)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
