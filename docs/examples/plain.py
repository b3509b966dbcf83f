"""Handwritten digits with a small network, on one device. An argument names a file for the losses."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    epochs: int = 10
    batch_size: int = 64
    lr: float = 0.05
    hidden: int = 128
    seed: int = 0


def load_data():
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train, test = train_test_split(range(len(y)), test_size=357, random_state=0)
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def make_model(config):
    torch.manual_seed(config.seed)
    return nn.Sequential(nn.Linear(64, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 10))


def num_correct(model, batch):
    x, y = batch
    return (model(x).argmax(dim=1) == y).sum()


def main(config):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(config).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    train_data, test_data = load_data()
    train_loader = DataLoader(train_data, batch_size=config.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=256)
    losses = []
    for epoch in range(config.epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            correct = sum(num_correct(model, (x.to(device), y.to(device))) for x, y in test_loader)
        print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}, accuracy {correct / len(test_data):.4f}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("\n".join(map(str, losses)))


if __name__ == "__main__":
    main(Config())
