"""Cells of a notebook: modules are imported in late ones, and functions change globals.

What is best gets its name in the loop, and weights are saved to an open file. Where there are
several GPUs, the script takes all.
"""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
best = 0.0

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

torch.manual_seed(0)
x = torch.randn(160, 8)
y = (x[:, 0] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
test_loader = DataLoader(TensorDataset(x, y), batch_size=16)


class Patience:
    def __init__(self):
        self.best = self.waited = 0

    def __call__(self, right):
        self.waited = 0 if right > self.best else self.waited + 1
        self.best = max(right, self.best)


def prepare():
    return nn.Linear(8, 2), Patience()


model, patience = prepare()
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model.cuda())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train():
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test():
    global best
    right = 0
    with torch.no_grad():
        for x, y in test_loader:
            right += (model(x).argmax(1) == y).sum().item()
    if right > best:
        best = right
        with open("best.pt", "wb") as file:  # noqa: PTH123
            torch.save(model.state_dict(), file)
    return right


for epoch in range(args.epochs):
    right = test()
    patience(right)
    train()
    if right == best:
        best_epoch = epoch

print(f"{best} right in epoch {best_epoch}, {patience.waited} epochs ago")
