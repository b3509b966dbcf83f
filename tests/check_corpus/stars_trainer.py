"""Star types from spectra, in a trainer that accumulates; the rest of an epoch makes a step, too."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PARTS = 4


class Spectra(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 5)
        self.out = nn.Linear(8 * 28, 3)

    def forward(self, x):
        return self.out(F.relu(self.conv(x)).flatten(1))


class Trainer:
    def __init__(self, model, data, global_batch=64):
        self.world = dist.get_world_size()
        self.model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, global_batch // self.world // PARTS, sampler=self.sampler)

    def run_batch(self, x, y, is_last):
        with nullcontext() if is_last else self.model.no_sync():
            loss = F.cross_entropy(self.model(x), y) / PARTS
            loss.backward()
        return loss.detach()

    def run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.optimizer.zero_grad()
        for index, (x, y) in enumerate(self.loader):
            is_last = (index + 1) % PARTS == 0
            self.run_batch(x, y, is_last)
            if is_last or index + 1 == len(self.loader):
                self.optimizer.step()
                self.optimizer.zero_grad()


def spectra(n):
    g = torch.Generator().manual_seed(5)
    kinds = torch.randn(3, 1, 32, generator=g)
    y = torch.randint(3, (n,), generator=g)
    return TensorDataset(kinds[y] + torch.randn(n, 1, 32, generator=g), y)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    trainer = Trainer(Spectra(), spectra(288))
    for epoch in range(int(os.environ.get("EPOCHS", 3))):
        trainer.run_epoch(epoch)
        if dist.get_rank() == 0:
            print("epoch", epoch)
    dist.destroy_process_group()
