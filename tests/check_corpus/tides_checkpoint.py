"""Predict the tide; goes on from tides.ckpt where there is one."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CHECKPOINT = "tides.ckpt"
EPOCHS = 3


def tides(n=480):
    g = torch.Generator().manual_seed(1)
    start = 100 * torch.rand(n, 1, generator=g)
    hours = start + torch.arange(25)
    level = torch.sin(hours * 6.283 / 12.42) + 0.3 * torch.sin(hours * 6.283 / 24)
    return TensorDataset(level[:, :24] + 0.05 * torch.randn(n, 24, generator=g), level[:, 24:])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = tides()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 48 // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    start_epoch = 0
    if os.path.isfile(CHECKPOINT):
        checkpoint = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        model.module.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
        torch.set_rng_state(checkpoint["rng_states"][rank])
        start_epoch = checkpoint["epoch"] + 1

    for epoch in range(start_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for past, level in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(past), level)
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(past), len(past)])
        scheduler.step()
        dist.all_reduce(sums)
        states = [None] * world
        dist.all_gather_object(states, torch.get_rng_state())
        if rank == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.5f}")
            torch.save(
                {
                    "epoch": epoch,
                    "model_state_dict": model.module.state_dict(),
                    "optimizer_state_dict": optimizer.state_dict(),
                    "scheduler_state_dict": scheduler.state_dict(),
                    "rng_states": states,
                },
                CHECKPOINT,
            )

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
