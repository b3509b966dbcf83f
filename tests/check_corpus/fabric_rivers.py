"""Level of a river in six hours, with Lightning Fabric."""

import argparse
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def levels(n):
    g = torch.Generator().manual_seed(6)
    rain = torch.rand(n, 24, generator=g).clamp(min=0.5) - 0.5
    weights = torch.exp(-torch.arange(24.0) / 8).flip(0)
    return TensorDataset(rain, (rain * weights).sum(1, keepdim=True))


def main(args):
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    fabric = L.Fabric(accelerator="auto", devices=devices, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(args.seed, verbose=False)

    data = levels(480)
    loader = DataLoader(data, batch_size=args.batch_size // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1)).to(fabric.device)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=args.lr))

    for epoch in range(args.epochs):
        model.train()
        sums = torch.zeros(2, device=fabric.device)
        for rain, level in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(rain), level)
            fabric.backward(loss)
            optimizer.step()
            sums[0] += loss.detach() * len(rain)
            sums[1] += len(rain)
        sums = fabric.all_reduce(sums, reduce_op="sum")
        fabric.print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.5f}")

    fabric.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
