"""A model that trains itself, by its parts, and keeps the best of its epochs."""

import os
from time import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Meter:
    """The mean of some numbers."""

    def __init__(self) -> None:
        self.sum, self.count, self.mean = 0.0, 0, 0.0

    def update(self, number: float) -> None:
        self.sum += number
        self.count += 1
        self.mean = self.sum / self.count


class Net(nn.Module):
    """A net whose training calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh()

    def fit(self, epochs: int = 6, batch_size: int = 8) -> None:
        data = TensorDataset(torch.randn(64, 4))
        train = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
        test = DataLoader(TensorDataset(torch.randn(5, 4)))
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        losses, best, begin = [], 9.0, time()
        for epoch in range(epochs):
            total = 0.0
            for step, (x,) in enumerate(train):
                optimizer.zero_grad()
                targets = torch.zeros(batch_size, 1)
                loss = (self.last(self.encode(x)) - targets).square().mean()
                loss.backward()
                optimizer.step()
                total += loss.item()
            losses.append(total / (step + 1))
            meter = Meter()
            with torch.no_grad():
                for step, (x,) in enumerate(test):
                    meter.update(self.last(self.encode(x)).square().item())
            if meter.mean < best:
                best = meter.mean
                torch.save(self.state_dict(), "results/best.pt")
            print("epoch %d: %.6f, %.6f in the test" % (epoch, losses[-1], meter.mean))
            print(step + 1, "batches")
        assert len(losses) == epochs, "as a plot of them would"
        assert time() >= begin


if __name__ == "__main__":
    torch.manual_seed(0)
    if not os.path.exists("results"):
        os.mkdir("results")
    Net().fit()
