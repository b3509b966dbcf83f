"""Inputs on very different scales: the model keeps a running mean and scale of what it sees."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class RunningScale(nn.Module):
    """Standardises by statistics of all batches so far; the batch at hand does not change its own output."""

    def __init__(self, features, momentum=0.05):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))

    def forward(self, x):
        out = (x - self.center) / self.scale
        if self.training:
            with torch.no_grad():
                self.center += self.momentum * (x.mean(0) - self.center)
                self.scale += self.momentum * (x.std(0) - self.scale)
        return out


def plant_data(n):
    g = torch.Generator().manual_seed(1)
    z = torch.randn(n, 6, generator=g)
    scales = torch.tensor([0.1, 1.0, 5.0, 20.0, 0.5, 2.0])
    return TensorDataset(z * scales + scales, (z[:, :3].sum(1) - z[:, 4])[:, None])


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = plant_data(640)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler)

    torch.manual_seed(0)
    net = nn.Sequential(RunningScale(6), nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DDP(net, broadcast_buffers=False)  # saves a broadcast in every step
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {(total[0] / total[1]).item():.4f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-3)
    main(parser.parse_args())
