"""Rented bikes per hour: mp.spawn with a free port, and a metric reduced to the first rank."""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def find_free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def hours(n):
    g = torch.Generator().manual_seed(24)
    hour, warm, rain = torch.rand(3, n, generator=g)
    bikes = torch.exp(-((hour - 0.7) ** 2) / 0.02) + warm - rain * warm
    return TensorDataset(torch.stack([hour, warm, rain], 1), bikes[:, None])


def main_worker(rank, args):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(args.port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.processes)
    data = hours(480)
    sampler = DistributedSampler(data, args.processes, rank)
    loader = DataLoader(data, args.batch_size // args.processes, sampler=sampler)
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for x, bikes in loader:
            loss = nn.functional.mse_loss(model(x), bikes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        scheduler.step()
        dist.reduce(sums, dst=0)
        if rank == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    args.port = find_free_port()
    mp.spawn(main_worker, args=(args,), nprocs=args.processes)
