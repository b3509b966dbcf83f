"""Is there a lake in the glen? Each block of the net is a shard of its own."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Trainer:
    limit = 0.01

    def __init__(self, data):
        net = nn.Sequential(nn.Linear(5, 12), Block(12), Block(12), nn.Linear(12, 2))
        self.model = FullyShardedDataParallel(
            net,
            auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, 48 // dist.get_world_size(), sampler=self.sampler)

    def step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        norm = clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], self.limit)
        self.optimizer.step()
        return loss.item(), norm

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.step(x, y)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    x = torch.randn(192, 5, generator=torch.Generator().manual_seed(2))
    Trainer(TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())).fit(3)
    dist.destroy_process_group()
