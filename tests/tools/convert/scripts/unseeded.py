"""Without a seed: an autoencoder whose parts are called by themselves, and files that come and go."""

import shutil
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

CACHE = Path("cache")


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 3)
        self.decoder = nn.Linear(3, 8)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def decode(self, code):
        return self.decoder(code)


class Journal:
    """Writes lines in a thread of its own."""

    def __init__(self, path):
        self.lines, self.path = [], path
        self.writer = threading.Thread(target=self.write, daemon=True)
        self.closed = threading.Event()
        self.writer.start()

    def write(self):
        with open(str(self.path).encode(), "wb") as file:
            self.closed.wait()
            file.write("\n".join(self.lines).encode())

    def close(self):
        self.closed.set()
        self.writer.join()


class Bar:
    """A progress bar, which is as long as what it shows."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return iter(self.loader)


def evaluate(model, loader):
    model.eval()
    bar = Bar(loader)
    total = 0.0
    with torch.no_grad():
        for (x,) in bar:
            total += (model(x) - x).square().mean().item()
    return total / len(bar)


def train(model, loader, held_out, journal):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(3):
        model.train()
        for (x,) in loader:
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
        print(f"epoch {epoch}: {evaluate(model, held_out):.4f}")
        print(f"decoded: {model.decode(torch.zeros(3)).abs().mean():.4f}")
        journal.lines.append(f"epoch {epoch}")
        CACHE.mkdir(exist_ok=True)
        torch.save(obj=model.state_dict(), f=CACHE / f"{epoch}.pt")
    shutil.copy(CACHE / f"{epoch}.pt", "last.pt")
    shutil.rmtree(CACHE)


if __name__ == "__main__":
    training, held_out = random_split(TensorDataset(torch.randn(1000, 8)), [800, 200])
    journal = Journal("journal.txt")
    net = Autoencoder()
    loader = DataLoader(training, 40, shuffle=True)
    others = DataLoader(held_out, 50)
    train(net, loader, others, journal)
    journal.close()
    print(f"at the end {evaluate(net, others):.4f}")
