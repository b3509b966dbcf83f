"""Outlines of kelp, turned a little each time they are read; one process, two workers."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Outlines(Dataset):
    def __init__(self, count):
        g = torch.Generator().manual_seed(17)
        self.points = torch.randn(count, 12, 2, generator=g)
        self.lengths = self.points.norm(dim=2).sum(1, keepdim=True)
        self.rng = np.random.default_rng(5)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        angle = torch.tensor(self.rng.uniform(-0.3, 0.3))
        turn = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
        return (self.points[index] @ turn).flatten(), self.lengths[index]


def main():
    torch.manual_seed(0)
    loader = DataLoader(Outlines(192), batch_size=16, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        print(f"epoch {epoch}: {total / 192:.4f}")


if __name__ == "__main__":
    main()
