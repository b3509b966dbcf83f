"""Sort fruit by colour and shape. After each epoch, the mean validation accuracy over all processes."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def fruit(n, seed):
    kinds = torch.randn(5, 14, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (n,), generator=g)
    return TensorDataset(kinds[y] + torch.randn(n, 14, generator=g), y)


def average(value):
    value = torch.tensor(value)
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    accuracies = []
    for x, y in loader:
        accuracies.append((model.module(x).argmax(1) == y).float().mean().item())
    return average(sum(accuracies) / len(accuracies))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=40)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set, valid_set = fruit(400, 1), fruit(210, 2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, args.batch_size // world, sampler=sampler)
    valid_loader = DataLoader(Subset(valid_set, range(rank, len(valid_set), world)), batch_size=50)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(model, train_loader, optimizer)
        accuracy = validate(model, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}: validation accuracy {accuracy:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
