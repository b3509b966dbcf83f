"""Which well runs dry? A step after three batches."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Accumulator:
    def __init__(self, optimizer, count):
        self.optimizer, self.count, self.held = optimizer, count, 0

    @property
    def is_full(self):
        return self.held + 1 == self.count

    def add(self, loss):
        (loss / self.count).backward()
        self.held += 1
        if self.held == self.count:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.held = 0


def train(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        steps = Accumulator(optimizer, 3)
        for x, y in loader:
            with nullcontext() if steps.is_full else model.no_sync():
                steps.add(nn.functional.cross_entropy(model(x), y))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    x = torch.randn(8 * 2 * 16, 9, generator=torch.Generator().manual_seed(14))
    data = TensorDataset(x, x[:, :3].argmax(1))
    model = DistributedDataParallel(nn.Linear(9, 3))
    loader = DataLoader(data, 32 // dist.get_world_size(), sampler=DistributedSampler(data))
    train(model, loader, torch.optim.SGD(model.parameters(), lr=0.2), 5)
    dist.destroy_process_group()
