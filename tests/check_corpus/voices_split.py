"""Speakers from voice features. The split is drawn with NumPy; each rank takes its share of both parts."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset


class Voices(Dataset):
    def __init__(self, n):
        rng = np.random.default_rng(4)
        voices = rng.normal(size=(5, 12))
        self.speaker = rng.integers(5, size=n)
        self.features = (voices[self.speaker] + rng.normal(size=(n, 12))).astype(np.float32)

    def __len__(self):
        return len(self.speaker)

    def __getitem__(self, index):
        return self.features[index], int(self.speaker[index])


class Run:
    def __init__(self, rank, world, n=600, global_batch=60):
        data = Voices(n)
        order = np.random.default_rng(100 + rank).permutation(n)
        train, held_out = order[: n - 120], order[n - 120 :]
        self.loader = DataLoader(
            Subset(data, train[rank::world].tolist()), global_batch // world, shuffle=True
        )
        self.held_out = DataLoader(Subset(data, held_out[rank::world].tolist()), 30)
        torch.manual_seed(0)
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(12, 5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        torch.manual_seed(1 + rank)

    def train(self):
        for x, speaker in self.loader:
            loss = nn.functional.cross_entropy(self.model(x), speaker)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def test(self):
        right = torch.zeros(2)
        for x, speaker in self.held_out:
            right[0] += (self.model(x).argmax(1) == speaker).sum()
            right[1] += len(speaker)
        dist.all_reduce(right)
        return float(right[0] / right[1])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run = Run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    for epoch in range(3):
        run.train()
        value = run.test()
        if dist.get_rank() == 0:
            print(epoch, f"{value:.3f}")
    dist.destroy_process_group()
