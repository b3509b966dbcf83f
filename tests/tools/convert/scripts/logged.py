"""Logs, rarely, the loss of a batch, and prints a tuple of a sum of means and a share.

The trained model has two names where its optimizer is made. A second process cannot make the folder.
"""

import logging
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, loader):
        self.model = model
        self.loader = loader
        self.logger = logging.getLogger("trainer")
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def fit(self, epochs):
        model = self.model
        for epoch in range(epochs):
            total = right = count = 0
            for step, (x, y) in enumerate(self.loader):
                self.optimizer.zero_grad()
                output = model(x)
                loss = nn.functional.cross_entropy(output, y)
                loss.backward()
                self.optimizer.step()
                if step % 5 == 0:
                    self.logger.info(f"epoch {epoch}, batch {step}: {loss.item():.4f}")
                total += loss.item()
                right += (output.argmax(1) == y).sum().item()
                count += len(y)
            result = total, right / count
            print(result)
        Path("results").mkdir()
        torch.save(model, "results/model.pt")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    x = torch.randn(320, 8)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    Trainer(nn.Linear(8, 2), DataLoader(data, batch_size=32, shuffle=True)).fit(2)
