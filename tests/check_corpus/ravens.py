"""Which raven calls? The net ends in probabilities."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def calls(n):
    generator = torch.Generator().manual_seed(4)
    call = torch.randn(n, 7, generator=generator)
    return TensorDataset(call, call[:, :5].argmax(1))


class Ravens(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, call):
        return F.softmax(self.body(call), dim=1)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = calls(192)
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, 48 // world, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(Ravens())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for call, raven in loader:
            optimizer.zero_grad()
            F.nll_loss(model(call), raven).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
