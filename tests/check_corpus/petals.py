"""Petal widths. The weights' moving average is what is evaluated and kept."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Average:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for mine, new in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(new, 1 - self.decay)


def data(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=g)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def evaluate(model, dataset, rank, world):
    share = Subset(dataset, range(rank, len(dataset), world))
    sums = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(share, 25):
            sums += torch.tensor([(model(x) - y).square().sum().item(), float(len(x))], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).sqrt().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 1))
    average = Average(net, 0.95)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 * world)
    train, test = data(300, 0), data(101, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 15, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            average.update(net)
        rmse = evaluate(average.model, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: rmse {rmse:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
