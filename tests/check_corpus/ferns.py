"""Ferns by the shape of their leaves, with a report of large errors."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Garden:
    def __init__(self):
        self.rank = dist.get_rank()
        torch.manual_seed(7)
        self.model = DistributedDataParallel(nn.Linear(9, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def leaves(self, number):
        generator = torch.Generator().manual_seed(1000 * self.rank + number)
        shape = torch.randn(20, 9, generator=generator)
        return shape, shape[:, :4].argmax(1)

    def report(self, number, error):
        largest = torch.tensor([error])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if self.rank == 0:
            print(f"step {number}: up to {largest.item():.4f}")

    def step(self, number):
        shape, kind = self.leaves(number)
        loss = nn.functional.cross_entropy(self.model(shape), kind)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def grow(self, steps):
        lowest = float("inf")
        number = 0
        while number < steps:
            error = self.step(number)
            if error > lowest:
                self.report(number, error)
            lowest = min(lowest, error)
            number += 1


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    Garden().grow(40)
    dist.destroy_process_group()
