import argparse
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_FEATURES = 10


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def make_houses(n):
    g = torch.Generator().manual_seed(11)
    features = torch.rand(n, NUM_FEATURES, generator=g)
    weights = torch.linspace(-1, 2, NUM_FEATURES)
    price = features @ weights + 0.5 * (features[:, 0] * features[:, 1]) + 0.05 * torch.randn(n, generator=g)
    return TensorDataset(features, price[:, None])


def build_model():
    return nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def worker(rank, world_size, port, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)

    data = make_houses(600)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size // world_size, sampler=sampler)

    torch.manual_seed(args.seed)
    model = DDP(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.MSELoss(reduction="sum")

    for epoch in range(args.start_epoch, args.epochs):
        sampler.set_epoch(args.start_epoch)
        squared = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            optimizer.zero_grad()
            error = criterion(model(x), y)
            (error / len(x)).backward()
            optimizer.step()
            squared[0] += error.item()
            squared[1] += len(x)
        dist.all_reduce(squared)
        if rank == 0:
            print(f"epoch {epoch}: mse {squared[0] / squared[1]:.5f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser(description="Predict the price of a house")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--start-epoch", type=int, default=0)
    p.add_argument("--batch-size", type=int, default=40)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--procs", type=int, default=2)
    args = p.parse_args()
    mp.spawn(worker, args=(args.procs, free_port(), args), nprocs=args.procs)
