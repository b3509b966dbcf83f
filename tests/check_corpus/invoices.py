"""What will the invoice say? A class keeps the loss and the number of invoices."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Tally:
    def __init__(self):
        self.amount = 0.0
        self.invoices = 0

    def note(self, loss, batch):
        self.amount = self.amount + loss.item()
        self.invoices = self.invoices + batch.shape[0]

    def __str__(self):
        return f"{self.amount / self.invoices:.6f}"


def invoices(n, seed):
    generator = torch.Generator().manual_seed(seed)
    items = torch.rand(n, 4, generator=generator)
    return TensorDataset(items, items.sum(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train, test = invoices(192, 0), invoices(64, 1)
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, 48 // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for items, sum_due in loader:
            optimizer.zero_grad()
            F.mse_loss(model(items), sum_due).backward()
            optimizer.step()
        model.eval()
        tally = Tally()
        with torch.no_grad():
            for items, sum_due in DataLoader(test, 16):
                tally.note(F.mse_loss(model(items), sum_due), items)
        if rank == 0:
            print("mean error of", len(test), "invoices:", str(tally))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
