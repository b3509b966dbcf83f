"""Tree cover from satellite bands; the first process validates once per epoch."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def bands(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 6, generator=g)
    cover = torch.sigmoid(8 * (x[:, 3] - x[:, 2]) - 4 * x[:, 5] + 1)
    return TensorDataset(x, cover[:, None])


class Meter:
    """A mean over everything that all processes have seen."""

    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def synchronised(self):
        both = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(both)
        return (both[0] / both[1]).item()


def train(model, loader, optimizer):
    model.train()
    meter = Meter()
    for x, cover in loader:
        loss = nn.functional.mse_loss(model(x), cover)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item(), len(x))
    return meter.synchronised()


@torch.no_grad()
def validate(model, data):
    model.eval()
    meter = Meter()
    for x, cover in DataLoader(data, batch_size=50):
        meter.update(nn.functional.mse_loss(model.module(x), cover).item(), len(x))
    return meter.synchronised()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set, valid_set = bands(480, 0), bands(150, 1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 48 // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer)
        if rank == 0:
            print(f"epoch {epoch}: training {loss:.4f}, validation {validate(model, valid_set):.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
