"""Delays of trains, read as a stream of records by two workers per rank."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Records(IterableDataset):
    """Record number n goes to rank n % world. The order is another one in each epoch."""

    def __init__(self, count, rank, world):
        self.count, self.rank, self.world, self.epoch = count, rank, world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        numbers = list(range(self.count))
        random.Random(self.epoch).shuffle(numbers)
        for number in numbers[self.rank :: self.world]:
            g = torch.Generator().manual_seed(number)
            x = torch.randn(6, generator=g)
            yield x, x[:3].sum().reshape(1)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    records = Records(240, rank, world)
    loader = DataLoader(records, batch_size=10, num_workers=2)
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * world)
    for epoch in range(2):
        records.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
