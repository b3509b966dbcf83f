"""Everyday sounds with Lightning Fabric; accuracy of the validation set after each epoch."""

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

KINDS, EPOCHS, GLOBAL_BATCH = 6, 3, 48


def sounds(n, seed):
    spectra = torch.rand(KINDS, 32, generator=torch.Generator().manual_seed(3))
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(KINDS, (n,), generator=g)
    return TensorDataset(spectra[kind] + 0.5 * torch.randn(n, 32, generator=g), kind)


class SoundNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, KINDS))

    def forward(self, x):
        return self.net(x)


def validate(fabric, model, loader):
    model.eval()
    accuracy = []
    with torch.no_grad():
        for x, kind in loader:
            accuracy.append((model(x).argmax(1) == kind).float().mean())
    return fabric.all_reduce(torch.stack(accuracy).mean(), reduce_op="mean").item()


def main():
    fabric = Fabric(accelerator="auto", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = SoundNet()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    valid_set = sounds(130, 2)
    mine = Subset(valid_set, range(fabric.global_rank, len(valid_set), fabric.world_size))
    train_loader = fabric.setup_dataloaders(
        DataLoader(sounds(480, 1), GLOBAL_BATCH // fabric.world_size, shuffle=True)
    )
    valid_loader = fabric.setup_dataloaders(DataLoader(mine, 30), use_distributed_sampler=False)
    for epoch in range(EPOCHS):
        model.train()
        for x, kind in train_loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), kind))
            optimizer.step()
        accuracy = validate(fabric, model, valid_loader)
        fabric.print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    fabric.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
