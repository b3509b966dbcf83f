"""A conv net with batch norm, 64 samples per process: enough for statistics of their own."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def leather(n, seed):
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 1, 10, 10, generator=g)
    flaw = torch.randint(2, (n,), generator=g)
    images[flaw == 1, 0, 3:6, 4] += 3
    return TensorDataset(images, flaw)


def conv_bn(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def network():
    return nn.Sequential(conv_bn(1, 8), conv_bn(8, 8), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def accuracy(model, loader):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, flaw in loader:
            counts += torch.tensor([(model(images).argmax(1) == flaw).sum().item(), len(flaw)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--lr", type=float, default=0.02, help="for one process")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set, test_set = leather(768, 0), leather(200, 1)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), 50)
    torch.manual_seed(0)
    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * world, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, flaw in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), flaw).backward()
            optimizer.step()
        result = accuracy(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {result:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
