"""Will the barge pass under the bridge? Rank 0 keeps a running mean of how often the net is right."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def barges(n, seed):
    generator = torch.Generator().manual_seed(seed)
    load = torch.randn(n, 5, generator=generator)
    return TensorDataset(load, (load.sum(1) > 0).long())


@torch.no_grad()
def how_often_right(net, loader):
    net.eval()
    average = 0.0
    for number, (load, passes) in enumerate(loader, 1):
        right = (net(load).argmax(1) == passes).sum().item()
        average += (right / len(load) - average) / number
    net.train()
    return 100 * average


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train, test = barges(192, 0), barges(75, 1)
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, 32 // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for load, passes in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(load), passes).backward()
            optimizer.step()
        if rank == 0:
            print("right: {:.3f} %".format(how_often_right(model.module, DataLoader(test, 20))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
