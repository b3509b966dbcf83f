"""A net with dropout, validated after each epoch on the whole validation set (shared out by stride)."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def garments(n, seed):
    pattern = torch.randn(6, 48, generator=torch.Generator().manual_seed(60))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(6, (n,), generator=g)
    return TensorDataset(pattern[y] + 1.5 * torch.randn(n, 48, generator=g), y)


class Trainer:
    def __init__(self, model, args):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = DDP(model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.criterion = nn.CrossEntropyLoss()
        train_set, valid_set = garments(480, 0), garments(151, 1)
        self.sampler = DistributedSampler(train_set)
        self.train_loader = DataLoader(train_set, args.batch_size // self.world, sampler=self.sampler)
        mine = range(self.rank, len(valid_set), self.world)
        self.valid_loader = DataLoader(Subset(valid_set, mine), 32)
        self.epochs = args.epochs

    def train(self):
        self.model.train()
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.train_loader:
                self.optimizer.zero_grad()
                self.criterion(self.model(x), y).backward()
                self.optimizer.step()
            accuracy = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch}: validation accuracy {accuracy:.4f}")

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        counts = torch.zeros(2, dtype=torch.long)
        for x, y in self.valid_loader:
            counts[0] += (self.model.module(x).argmax(1) == y).sum()
            counts[1] += len(y)
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(96, 6))
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # every process drops other units
    Trainer(model, args).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
