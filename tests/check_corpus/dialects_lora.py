"""Dialects from word vectors: low-rank adapters beside frozen weights."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Adapted(nn.Module):
    """A frozen layer with a low-rank change beside it."""

    def __init__(self, inputs, outputs, rank=2):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


class Trainer:
    def __init__(self, model, data, global_batch=50):
        self.model = nn.parallel.DistributedDataParallel(model)
        named = self.model.named_parameters()
        self.optimizer = torch.optim.AdamW([p for name, p in named if "lora" not in name], lr=5e-3)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, global_batch // dist.get_world_size(), sampler=self.sampler)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.model.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()


def words(n):
    g = torch.Generator().manual_seed(43)
    kinds = torch.randn(4, 16, generator=g)
    y = torch.randint(4, (n,), generator=g)
    return TensorDataset(kinds[y] + torch.randn(n, 16, generator=g), y)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(16, 32), nn.ReLU(), Adapted(32, 4))
    Trainer(model, words(300)).fit(int(os.environ.get("EPOCHS", 3)))
    dist.destroy_process_group()
