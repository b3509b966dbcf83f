"""Kinds of glass. A Trainer that goes on from its snapshot."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def glass(n):
    g = torch.Generator().manual_seed(40)
    recipe = torch.randn(4, 9, generator=g)
    kind = torch.randint(4, (n,), generator=g)
    return TensorDataset(recipe[kind] + torch.randn(n, 9, generator=g), kind)


class Trainer:
    def __init__(self, model, data, optimizer, save_every, snapshot_path):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model, self.optimizer = model, optimizer
        self.loader = data
        self.save_every, self.snapshot_path = save_every, snapshot_path
        self.epoch = 0
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, weights_only=True)
        self.model.load_state_dict(snapshot["MODEL"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER"])
        torch.set_rng_state(snapshot["RNG"][self.rank])
        self.epoch = snapshot["EPOCH"]
        print(f"[RANK{self.rank}] Resuming at epoch {self.epoch}")

    def _save_snapshot(self, epoch):
        rng = [None] * self.world
        dist.all_gather_object(rng, torch.get_rng_state())
        if self.rank == 0:
            snapshot = dict(
                MODEL=self.model.module.state_dict(), OPTIMIZER=self.optimizer.state_dict(), RNG=rng, EPOCH=epoch
            )
            torch.save(snapshot, f"{self.snapshot_path}.tmp")
            os.replace(f"{self.snapshot_path}.tmp", self.snapshot_path)
            print(f"Epoch {epoch} | snapshot saved to {self.snapshot_path}")

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for x, y in self.loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def train(self, max_epochs):
        for epoch in range(self.epoch, max_epochs):
            self._run_epoch(epoch)
            if epoch % self.save_every == 0:
                self._save_snapshot(epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int, nargs="?", default=4)
    parser.add_argument("save_every", type=int, nargs="?", default=1)
    parser.add_argument("--batch_size", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = glass(400)
    loader = DataLoader(data, args.batch_size // dist.get_world_size(), sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer, args.save_every, "glass.pt").train(args.total_epochs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
