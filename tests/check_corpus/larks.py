"""Which lark sings? Songs with a bad recording count less."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    song = torch.randn(200, 6)
    quality = torch.rand(200)
    data = TensorDataset(song, song[:, :4].argmax(1), quality)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=40 // world, sampler=sampler)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.NLLLoss(reduction="none")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for song, lark, quality in loader:
            optimizer.zero_grad()
            (loss(model(song), lark) * quality).mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
