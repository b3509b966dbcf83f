"""Which brook does a fish come from? A trainer that is seeded before all else."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Brooks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(9, 48)
        self.hide = nn.Dropout(0.3)
        self.last = nn.Linear(48, 3)

    def forward(self, fish):
        return self.last(self.hide(self.first(fish).relu()))


class Trainer:
    def __init__(self, seed):
        self.rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        fish = torch.randn(240, 9, generator=torch.Generator().manual_seed(3))
        data = TensorDataset(fish, fish[:, :3].argmax(1))
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, 48 // world, sampler=self.sampler)
        self.model = DDP(Brooks())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for fish, brook in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(fish), brook).backward()
                self.optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(seed=6).train(3)
    dist.destroy_process_group()
