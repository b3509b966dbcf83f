"""Leaves by their measures: ranks by mp.spawn, random flips in the data set."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Leaves(Dataset):
    def __init__(self, n, noise):
        g = torch.Generator().manual_seed(9)
        self.x = torch.randn(n, 12, generator=g)
        self.y = (self.x[:, 0] * self.x[:, 1] > 0).float()
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if self.noise:
            x = x + self.noise * torch.randn(12)
        return x, self.y[i]


def train(rank, args):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = args.port
    dist.init_process_group("gloo", rank=rank, world_size=args.procs)
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
    net = DistributedDataParallel(net)
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=6, gamma=0.5)
    data = Leaves(160, args.noise)
    sampler = DistributedSampler(data, num_replicas=args.procs, rank=rank)
    loader = DataLoader(data, args.batch // args.procs, sampler=sampler, num_workers=args.workers)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--port", default="29513")
    args = parser.parse_args()
    mp.spawn(train, (args,), nprocs=args.procs)
