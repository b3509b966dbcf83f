"""Recognise drawn letters. The test set is shared out over the processes, the counts are added up."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 5


def letters(n, seed):
    strokes = torch.randn(CLASSES, 1, 10, 10, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=g)
    return TensorDataset(strokes[labels] + 1.5 * torch.randn(n, 1, 10, 10, generator=g), labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3)
        self.fc1 = nn.Linear(12 * 4 * 4, 40)
        self.fc2 = nn.Linear(40, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def train(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(dim=1) == y).sum().item()
            total += y.numel()
    counts = torch.tensor([correct, total])
    dist.all_reduce(counts, op=dist.ReduceOp.SUM)
    return counts[0].item() / counts[1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    train_set, test_set = letters(512, 0), letters(201, 1)
    train_sampler = DistributedSampler(train_set, shuffle=True)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, args.batch_size // world, sampler=train_sampler)
    test_loader = DataLoader(test_set, 32, sampler=test_sampler)

    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(model, train_loader, optimizer)
        accuracy = test(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: test accuracy {100 * accuracy:.2f}%")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
