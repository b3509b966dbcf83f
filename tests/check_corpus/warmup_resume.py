"""Poses of a hand with a small transformer. The learning rate warms up and then falls with the square root."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def hands(n=480):
    g = torch.Generator().manual_seed(11)
    poses = torch.randn(5, 6, 3, generator=g)
    pose = torch.randint(5, (n,), generator=g)
    return TensorDataset(poses[pose] + 1.2 * torch.randn(n, 6, 3, generator=g), pose)


class PoseNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.project = nn.Linear(3, dim)
        self.position = nn.Parameter(torch.zeros(6, dim))
        self.layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(dim, 5)

    def forward(self, joints):
        return self.out(self.layer(self.project(joints) + self.position).mean(1))


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        data = hands()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, args.batch_size // self.world, sampler=self.sampler)
        torch.manual_seed(0)
        self.net = PoseNet()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=args.lr)
        self.epoch = self.step = 0
        if os.path.exists(args.snapshot):
            self.load()
        self.model = DDP(self.net)

    def load(self):
        state = torch.load(self.args.snapshot, map_location="cpu", weights_only=True)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"][self.rank])
        self.epoch = state["epoch"]

    def save(self):
        rng = [None] * self.world
        dist.all_gather_object(rng, torch.get_rng_state())
        if self.rank == 0:
            state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**state, "epoch": self.epoch, "step": self.step, "rng": rng}, self.args.snapshot + ".tmp")
            os.replace(self.args.snapshot + ".tmp", self.args.snapshot)

    def set_lr(self):
        warmup = self.args.warmup
        factor = min((self.step + 1) / warmup, (warmup / (self.step + 1)) ** 0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * factor

    def run(self):
        while self.epoch < self.args.epochs:
            self.sampler.set_epoch(self.epoch)
            for joints, pose in self.loader:
                self.set_lr()
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(joints), pose).backward()
                self.optimizer.step()
                self.step += 1
            self.epoch += 1
            self.save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=10, help="steps")
    parser.add_argument("--snapshot", default="poses.pt")
    dist.init_process_group("gloo")
    Trainer(parser.parse_args()).run()
    dist.barrier()
    dist.destroy_process_group()
