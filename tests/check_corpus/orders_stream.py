"""Forecast the size of the next order from a stream of shops' histories; one shop after the other."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

SHOPS = 10


def history(shop):
    """A shop's orders: the bigger shops have longer histories."""
    g = torch.Generator().manual_seed(shop)
    days = torch.arange(60 + 24 * shop)
    return 1 + 0.5 * torch.sin(days / 7 * 6.283 + shop) + 0.05 * torch.randn(len(days), generator=g)


class Orders(IterableDataset):
    def __init__(self, rank, world_size):
        self.shops = list(range(SHOPS))[rank::world_size]

    def __iter__(self):
        for shop in self.shops:
            orders = history(shop)
            for day in range(0, len(orders) - 8, 4):
                yield orders[day : day + 7], orders[day + 7 : day + 8]


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * world_size, momentum=0.9)
    loader = DataLoader(Orders(rank, world_size), batch_size=16)

    for epoch in range(3):
        error = torch.zeros(2)
        for week, following in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(week), following)
            loss.backward()
            optimizer.step()
            error += torch.tensor([loss.item() * len(week), len(week)])
        dist.all_reduce(error)
        if rank == 0:
            print(f"epoch {epoch}: mse {(error[0] / error[1]).item():.4f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
