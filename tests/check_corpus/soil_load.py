"""Soil types from a probe's readings."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def soil(n):
    g = torch.Generator().manual_seed(9)
    types = torch.randn(4, 7, generator=g)
    kind = torch.randint(4, (n,), generator=g)
    return TensorDataset(types[kind] + 0.8 * torch.randn(n, 7, generator=g), kind)


def save_checkpoint(path, net, optimizer, scheduler, epoch, args):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    if dist.get_rank() == 0:
        checkpoint = {
            "net": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": states,
            "epoch": epoch,
            "args": args,
        }
        torch.save(checkpoint, path + ".tmp")
        os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--checkpoint", default="soil.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    start = 0
    if os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=False)
        net.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["rng"][rank])
        start = checkpoint["epoch"] + 1
    model = DDP(net)
    data = soil(400)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // world, sampler=sampler)
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for x, kind in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), kind)
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        scheduler.step()
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f}")
        save_checkpoint(args.checkpoint, net, optimizer, scheduler, epoch, args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
