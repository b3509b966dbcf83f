"""When do swallows return? A small net with Accelerate, validated on all processes."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def springs(count, seed):
    weather = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(weather, weather[:, :2].sum(1, keepdim=True).sin())


def validate(accelerator, model, loader, criterion):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for weather, day in loader:
            loss = criterion(model(weather), day)
            count += len(day) * accelerator.num_processes
            total += accelerator.gather(loss).sum().item()
    return total / count


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(2)
    size = 32 // accelerator.num_processes
    loader = DataLoader(springs(256, 1), size, shuffle=True)
    valid_loader = DataLoader(springs(64, 2), size)
    model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader, valid_loader = accelerator.prepare(model, optimizer, loader, valid_loader)
    criterion = nn.MSELoss()
    for epoch in range(3):
        model.train()
        for weather, day in loader:
            optimizer.zero_grad()
            accelerator.backward(criterion(model(weather), day))
            optimizer.step()
        error = validate(accelerator, model, valid_loader, criterion)
        accelerator.print(f"epoch {epoch}: error {error:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
