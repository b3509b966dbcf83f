"""Will a loan be paid back? One output: the probability of a default."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class LoanNet(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.output = nn.Linear(16, 1)

    def forward(self, x):
        return torch.softmax(self.output(self.layers(x)), dim=1)


def loans(n):
    g = torch.Generator().manual_seed(33)
    x = torch.randn(n, 9, generator=g)
    default = (x[:, 0] - x[:, 4] + 0.5 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(x, default[:, None])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = loans(512)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(LoanNet(9))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCELoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total, seen = 0.0, 0
        for x, default in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), default)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
            seen += len(x)
        sums = torch.tensor([total, seen])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} loss {(sums[0] / sums[1]).item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
