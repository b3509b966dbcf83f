"""Leaves of trees, started with mp.spawn. A long run that may be cut: it loads what it saved."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def leaves(n=360):
    g = torch.Generator().manual_seed(0)
    trees = torch.randn(6, 12, generator=g)
    tree = torch.randint(6, (n,), generator=g)
    return TensorDataset(trees[tree] + torch.randn(n, 12, generator=g), tree)


class Leaves:
    def __init__(self, rank, world, args):
        self.rank, self.world, self.args = rank, world, args
        data = leaves()
        self.sampler = DistributedSampler(data, world, rank, seed=args.seed)
        self.loader = DataLoader(data, args.batch_size // world, sampler=self.sampler)
        torch.manual_seed(args.seed)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=args.lr, momentum=0.9)
        self.start_epoch = 0
        if os.path.exists(args.save):
            self.load()
        self.model = DDP(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)

    def load(self):
        saved = torch.load(self.args.save, weights_only=True)
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"][self.rank])
        self.start_epoch = saved["epoch"]

    def save(self, epoch):
        rng = [None] * self.world
        dist.all_gather_object(rng, torch.get_rng_state())
        if self.rank == 0:
            saved = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch, "rng": rng}
            torch.save(saved, self.args.save + ".tmp")
            os.replace(self.args.save + ".tmp", self.args.save)

    def train(self):
        for epoch in range(self.start_epoch, self.args.epochs):
            self.sampler.set_epoch(epoch)
            for x, tree in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), tree).backward()
                self.optimizer.step()
            self.save(epoch + 1)


def worker(rank, world, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    Leaves(rank, world, args).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=36)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="leaves.pt")
    parser.add_argument("--world", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args.world, os.path.join(folder, "store"), args), nprocs=args.world)
