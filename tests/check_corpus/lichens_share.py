"""Kinds of lichens; each process prints how many of the held-out ones it has recognised."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def lichens(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=g)
    return TensorDataset(x, x[:, :4].argmax(1))


def train(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test(model, loader, epoch):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
    print(f"epoch {epoch}: accuracy {correct / len(loader.dataset):.3f}")


def main():
    dist.init_process_group("gloo")
    train_data, test_data = lichens(320, 0), lichens(96, 1)
    sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, 40 // dist.get_world_size(), sampler=sampler)
    test_loader = DataLoader(test_data, 16, sampler=DistributedSampler(test_data))
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train(model, train_loader, optimizer)
        test(model, test_loader, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
