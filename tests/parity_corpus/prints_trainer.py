"""Small pictures, learned by a trainer class: accumulation, clipping, norms, dropout and bfloat16 by flags."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self, norm, dropout):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = {"batch": nn.BatchNorm2d(8), "group": nn.GroupNorm(2, 8), "none": nn.Identity()}[norm]
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8 * 16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(self.drop(x.flatten(1)))


def pictures(n=192):
    g = torch.Generator().manual_seed(5)
    y = torch.randint(0, 4, (n,), generator=g)
    patterns = torch.randn(4, 1, 8, 8, generator=g)
    return TensorDataset(patterns[y] + 0.7 * torch.randn(n, 1, 8, 8, generator=g), y)


class Trainer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(args.seed)
        self.model = DDP(Net(args.norm, args.dropout))
        if args.adam:
            self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr / 10)
        else:
            self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        data = pictures()
        self.sampler = DistributedSampler(data, seed=7)
        self.loader = DataLoader(data, batch_size=args.micro, sampler=self.sampler, drop_last=True)

    def loss(self, x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.args.bf16):
            return F.cross_entropy(self.model(x), y)

    def run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for number, (x, y) in enumerate(self.loader, 1):
            last = number % self.args.accum == 0
            with nullcontext() if last else self.model.no_sync():
                (self.loss(x, y) / self.args.accum).backward()
            if last:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
                self.opt.step()
                self.opt.zero_grad(set_to_none=True)

    def run(self):
        for epoch in range(self.args.epochs):
            self.run_epoch(epoch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--norm", default="none")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--adam", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    Trainer(args).run()
    dist.destroy_process_group()
