import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    ap = argparse.ArgumentParser("two moons")
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--bs", type=int, default=96, help="per process")
    ap.add_argument("--base-lr", type=float, default=0.05, help="for one process")
    return ap.parse_args()


def two_moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(n, generator=g) * math.pi
    upper = torch.rand(n, generator=g) > 0.5
    x = torch.where(upper, torch.cos(t), 1 - torch.cos(t))
    y = torch.where(upper, torch.sin(t), 0.5 - torch.sin(t))
    points = torch.stack([x, y], 1) + 0.1 * torch.randn(n, 2, generator=g)
    return TensorDataset(points, upper.long())


def train_one_epoch(model, loader, criterion, optimizer):
    model.train()
    for points, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(points), labels)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model, dataset):
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    points, labels = dataset.tensors
    mine = slice(rank, None, world)
    counts = torch.tensor([(model(points[mine]).argmax(1) == labels[mine]).sum().item(), len(labels[mine])])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    train, test = two_moons(1000, 0), two_moons(251, 1)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=args.bs, sampler=sampler, drop_last=True)

    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = optim.SGD(model.parameters(), lr=args.base_lr * world, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, criterion, optimizer)
        result = accuracy(model, test)
        if dist.get_rank() == 0:
            print(f"[{epoch}] test accuracy {result:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
