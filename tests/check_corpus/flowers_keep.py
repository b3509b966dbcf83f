"""Flowers, with a snapshot after each epoch from which the next start goes on."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def flowers(n):
    g = torch.Generator().manual_seed(4)
    center = 2 * torch.randn(3, 4, generator=g)
    kind = torch.randint(3, (n,), generator=g)
    return TensorDataset(center[kind] + torch.randn(n, 4, generator=g), kind)


def save(path, model, optimizer, epoch):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    snapshot = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": states,
        "next_epoch": epoch + 1,
    }
    temporary = f"{path}.{os.getpid()}"
    torch.save(snapshot, temporary)
    os.replace(temporary, path)


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    model.module.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    torch.set_rng_state(snapshot["rng"][dist.get_rank()])
    return snapshot["next_epoch"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=30)
    parser.add_argument("--snapshot", default="flowers.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    data = flowers(300)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(load(args.snapshot, model, optimizer), args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for x, kind in loader:
            loss = nn.functional.cross_entropy(model(x), kind)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {(sums[0] / sums[1]).item():.4f}")
        save(args.snapshot, model, optimizer, epoch)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
