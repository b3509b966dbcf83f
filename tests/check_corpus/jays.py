"""Is it a jay? A trainer that remembers how well it has done, and where."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, rank, world):
        self.rank = rank
        generator = torch.Generator().manual_seed(9)
        birds = torch.randn(240, 6, generator=generator)
        self.test = birds[200:], (birds[200:, 0] > 0).long()
        data = TensorDataset(birds[:200], (birds[:200, 0] > 0).long())
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, 40 // world, sampler=self.sampler)
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
        self.model = DDP(self.net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.top = 0.0

    def save(self, state, path):
        torch.save(state, f"{path}.part")
        os.replace(f"{path}.part", path)

    def evaluate(self):
        birds, jays = self.test
        self.net.eval()
        with torch.no_grad():
            hits = (self.net(birds).argmax(1) == jays).float()
        self.net.train()
        return hits.mean().item()

    def run(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for bird, jay in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(bird), jay).backward()
                self.optimizer.step()
            accuracy = self.evaluate()
            if self.rank == 0 and accuracy > self.top:
                state = {
                    "model": self.net.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "epoch": epoch + 1,
                    "accuracy": self.top,
                }
                self.top = accuracy
                self.save(state, "jays.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(dist.get_rank(), dist.get_world_size()).run(4)
    dist.destroy_process_group()
