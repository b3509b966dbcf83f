"""A network with two heads: the digit, and its parity as an auxiliary task."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(30, 64), nn.ReLU())
        self.digit = nn.Linear(64, 10)
        self.parity = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x, auxiliary=False):
        h = self.trunk(x)
        if auxiliary:
            return self.digit(h), self.parity(h)
        return self.digit(h)


def coded_digits(n):
    g = torch.Generator().manual_seed(12)
    codes = torch.randn(10, 30, generator=g)
    digits = torch.randint(10, (n,), generator=g)
    return TensorDataset(codes[digits] + 0.8 * torch.randn(n, 30, generator=g), digits)


def train_epoch(model, loader, optimizer):
    model.train()
    seen, loss_sum = 0, 0.0
    for x, digit in loader:
        loss = F.cross_entropy(model(x), digit)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(x)
        seen += len(x)
    result = torch.tensor([loss_sum, seen], dtype=torch.float64)
    dist.all_reduce(result)
    return (result[0] / result[1]).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", "--epochs", type=int, default=3)
    parser.add_argument("-b", "--batch", type=int, default=40)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = coded_digits(400)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=options.batch // dist.get_world_size(), sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"{epoch}: loss {loss:.4f}")
    dist.barrier()
    dist.destroy_process_group()
