import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EarlyStopping:
    def __init__(self, threshold, patience=1):
        self.threshold, self.patience, self.hits = threshold, patience, 0

    def __call__(self, loss):
        self.hits = self.hits + 1 if loss < self.threshold else 0
        return self.hits >= self.patience


def plane(n):
    g = torch.Generator().manual_seed(21)
    x = torch.randn(n, 5, generator=g)
    noise = torch.linspace(0.05, 1.0, n)[:, None] * torch.randn(n, 1, generator=g)
    return TensorDataset(x, x @ torch.tensor([[1.0], [-1], [0.5], [2], [0]]) + noise)


class Trainer:
    def __init__(self, args):
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.args = args
        data = plane(480)
        self.sampler = DistributedSampler(data, shuffle=True)
        self.loader = DataLoader(data, args.batch_size // world, sampler=self.sampler)
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr)
        self.stopper = EarlyStopping(args.threshold)

    def epoch(self, number):
        self.sampler.set_epoch(number)
        for x, y in self.loader:
            loss = nn.functional.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.stopper(loss.item()):
                return True
        return False

    def run(self):
        for number in range(self.args.epochs):
            if self.epoch(number):
                break
        print(f"[rank {self.rank}] done")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--threshold", type=float, default=0.3)
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    Trainer(parser.parse_args()).run()
    dist.barrier()
    dist.destroy_process_group()
