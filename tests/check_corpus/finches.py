"""Which finch sings? Every layer of the net is the same block."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Finches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.second = nn.Linear(32, 5)
        self.active = nn.ReLU()

    def forward(self, song):
        hidden = self.active(self.first(song))
        return self.active(self.second(hidden))


def main():
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    song = torch.randn(200, 6)
    data = TensorDataset(song, song[:, :5].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=40 // world, sampler=sampler)
    model = DDP(Finches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for song, finch in loader:
            optimizer.zero_grad()
            loss(model(song), finch).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
