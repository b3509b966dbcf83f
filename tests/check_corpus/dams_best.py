"""Will the dam hold? The best net of all epochs is kept."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def rate(model, loader):
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            right += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    model.train()
    return right


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(77))
    data = TensorDataset(x, (x[:, :4].sum(1) > x[:, 4:].sum(1)).long())
    train, held = Subset(data, range(320)), Subset(data, range(320, 400))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 40 // dist.get_world_size(), sampler=sampler)
    tests = DataLoader(held, 20, sampler=DistributedSampler(held, shuffle=False))
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    best = 0.0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
        right = rate(model, tests)
        accuracy = float(right[0] / right[1])
        if dist.get_rank() == 0 and accuracy > best:
            best = accuracy
            torch.save(model.module.state_dict(), "dam_best.new")
            os.replace("dam_best.new", "dam_best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
