"""Data that each epoch draws anew, and several statements on a line."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for epoch in range(3):
    samples = TensorDataset(torch.randn(64, 4) + epoch)
    for (x,) in DataLoader(samples, 8, shuffle=True):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(f"epoch {epoch}: {loss.item():.3f}")
