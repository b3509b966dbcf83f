"""How many otters are in a bay? The best model is kept, and a second call goes on from it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KEPT = "best_otters.pt"


def bays(count, seed):
    generator = torch.Generator().manual_seed(seed)
    depth = torch.rand(count, 6, generator=generator)
    return TensorDataset(depth, depth.sum(1, keepdim=True).square())


def error_of(model, loader, rank):
    squares = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for depth, otters in loader:
            squares += torch.tensor([(model(depth) - otters).square().sum(), len(depth)])
    model.train()
    dist.all_reduce(squares)
    return float(squares[0] / squares[1])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    begin, best = 0, float("inf")
    if os.path.exists(KEPT):
        kept = torch.load(KEPT, weights_only=True)
        model.load_state_dict(kept["model"])
        begin, best = kept["epoch"] + 1, kept["best"]
    model = DistributedDataParallel(model)
    train, test = bays(320, 1), bays(80, 2)
    sampler = DistributedSampler(train, seed=5)
    loader = DataLoader(train, 40 // dist.get_world_size(), sampler=sampler)
    tests = DataLoader(test, 20, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(begin, 4):
        sampler.set_epoch(epoch)
        for depth, otters in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(depth), otters).backward()
            optimizer.step()
        error = error_of(model, tests, rank)
        if error < best:
            best = error
            if rank == 0:
                state = {"model": model.module.state_dict(), "epoch": epoch, "best": best}
                torch.save(state, KEPT + ".tmp")
                os.replace(KEPT + ".tmp", KEPT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
