import argparse

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def robot_arm(n):
    """Where is the hand, given three angles?"""
    g = torch.Generator().manual_seed(15)
    angles = torch.rand(n, 3, generator=g) * 3.14 - 1.57
    bend = angles.cumsum(1)
    return TensorDataset(angles, torch.stack([bend.cos().sum(1), bend.sin().sum(1)], 1))


def run_epoch(model, loader, optimizer, scheduler):
    squared, n = 0.0, 0
    for angles, hand in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(angles), hand)
        loss.backward()
        optimizer.step()
        scheduler.step()
        squared += loss.item() * len(angles)
        n += len(angles)
    return torch.tensor([squared, n])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    data = robot_arm(400)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = run_epoch(model, loader, optimizer, scheduler)
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
