"""Train a small network on handwritten digits, on one process."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def train(model, loader, optimizer, epoch):
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
    print(f"epoch {epoch}: training loss {total / len(loader.dataset):.4f}")


def evaluate(model, loader):
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum().item()
    print(f"{correct} of {len(loader.dataset)} right")


def main():
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train_loader = DataLoader(
        TensorDataset(images[:1500], labels[:1500]), batch_size=50, shuffle=True
    )
    test_loader = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=100)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(5):
        train(model, train_loader, optimizer, epoch)
        evaluate(model, test_loader)
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
