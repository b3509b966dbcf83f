"""Flow of a river from its gauges. Gradients of four batches make one step."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gauges(n):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 12, generator=g)
    return TensorDataset(x, (x @ torch.randn(12, 1, generator=g)).tanh())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=128)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = gauges(512)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.global_batch // world // args.parts, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            with model.no_sync() if number % args.parts == 0 else contextlib.nullcontext():
                loss = nn.functional.mse_loss(model(x), y) / args.parts
                loss.backward()
            if number % args.parts == 0:
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: last loss of rank 0 {loss.item() * args.parts:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
