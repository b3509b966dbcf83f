"""Songs and pictures of starlings: two encoders that learn which belong together."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Pair(nn.Module):
    def __init__(self, songs=12, pictures=20, width=8):
        super().__init__()
        self.song = nn.Sequential(nn.Linear(songs, 32), nn.Tanh(), nn.Linear(32, width))
        self.picture = nn.Sequential(nn.Linear(pictures, 32), nn.Tanh(), nn.Linear(32, width))

    def forward(self, songs, pictures):
        return F.normalize(self.song(songs), dim=1), F.normalize(self.picture(pictures), dim=1)


def gather(x):
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def pair_loss(song, picture, temperature=0.2):
    songs, pictures = gather(song), gather(picture)
    first = dist.get_rank() * len(song)
    target = torch.arange(first, first + len(song))
    loss = F.cross_entropy(song @ pictures.T / temperature, target)
    return (loss + F.cross_entropy(picture @ songs.T / temperature, target)) / 2


def recordings(n=384):
    g = torch.Generator().manual_seed(11)
    bird = torch.randn(n, 6, generator=g)
    song = bird @ torch.randn(6, 12, generator=g)
    return TensorDataset(song, bird @ torch.randn(6, 20, generator=g))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = nn.parallel.DistributedDataParallel(Pair())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = recordings()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 64 // dist.get_world_size(), sampler=sampler, drop_last=True)
    for epoch in range(int(os.environ.get("EPOCHS", 3))):
        sampler.set_epoch(epoch)
        for songs, pictures in loader:
            optimizer.zero_grad()
            pair_loss(*model(songs, pictures)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
