"""All in the module: the batch size by name, a loss that is a sum, progress, and a best snapshot."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.randn(1200, 8, generator=torch.Generator().manual_seed(5))
targets = inputs.square().sum(1, keepdim=True)
batch_size = 40
loader = DataLoader(TensorDataset(inputs[:1000], targets[:1000]), batch_size=batch_size, shuffle=True)
held_out = DataLoader(TensorDataset(inputs[1000:], targets[1000:]), 50)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
squared = nn.MSELoss(reduction="sum")
best = None
for _ in range(4):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = squared(model(x.reshape(batch_size, 8)), y)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print("%d of %d samples, loss %.4f" % (step * len(x), len(loader.dataset), loss.item() / len(x)))
    schedule.step()
    losses, batches = 0, len(held_out)
    with torch.no_grad():
        for x, y in held_out:
            losses += squared(model(x), y).item() / len(x)
    mean = losses / batches
    print("held out, 200 samples: %.4f" % mean)
    if best is None or mean < best:
        best = mean
        torch.save(model, "best.pt")
print("saved:", os.path.getsize("best.pt") > 0)
