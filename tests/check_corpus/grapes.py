"""Grape varieties from spectra, configured by dotted overrides: grapes.py optim.lr=0.1 data.batch=8"""

import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, DistributedSampler


@dataclass
class DataCfg:
    batch: int = 16
    train: int = 256
    test: int = 96


@dataclass
class OptimCfg:
    lr: float = 0.05
    scale_with_ranks: bool = True


@dataclass
class Cfg:
    data: DataCfg = field(default_factory=DataCfg)
    optim: OptimCfg = field(default_factory=OptimCfg)
    epochs: int = 2


def parse(words):
    cfg = Cfg()
    for word in words:
        path, value = word.split("=")
        *owners, name = path.split(".")
        node = cfg
        for owner in owners:
            node = getattr(node, owner)
        setattr(node, name, type(getattr(node, name))(value))
    return cfg


def build_data(cfg):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(cfg.data.train + cfg.data.test, 12, generator=g)
    y = (x[:, :4].sum(1) > 0).long() + (x[:, 4] > 1).long()
    both = TensorDataset(x, y)
    n = cfg.data.train
    return Subset(both, range(n)), Subset(both, range(n, len(both)))


@torch.inference_mode()
def accuracy(model, data, cfg, rank, world):
    mine = Subset(data, range(rank, len(data), world))
    right, count = torch.zeros(1), 0
    for x, y in DataLoader(mine, cfg.data.batch):
        right += (model(x).argmax(1) == y).sum()
        count += len(y)
    dist.all_reduce(right)
    return (right / count).item()


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = build_data(cfg)
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    lr = cfg.optim.lr * (world if cfg.optim.scale_with_ranks else 1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, cfg.data.batch, sampler=sampler)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        ddp.eval()
        score = accuracy(ddp.module, test, cfg, rank, world)
        if rank == 0:
            print(f"epoch={epoch} accuracy={score:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
