"""Points on a swirl, made by a generator and judged by a critic; each has an optimizer."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOISE = 4


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def swirl(count):
    t = torch.linspace(0, 4 * math.pi, count)
    return TensorDataset(torch.stack([t * t.cos(), t * t.sin()], 1) / 12)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    generator = DDP(mlp(NOISE, 2))
    critic = mlp(2, 1)
    g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3 * world, betas=(0.5, 0.9))
    d_opt = torch.optim.Adam(critic.parameters(), lr=1e-3 * world, betas=(0.5, 0.9))
    bce = nn.BCEWithLogitsLoss()
    dataset = swirl(256)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    noise = torch.Generator().manual_seed(100 + rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            z = torch.randn(len(real), NOISE, generator=noise)
            with torch.no_grad():
                fake = generator(z)
            d_opt.zero_grad()
            loss = bce(critic(real), torch.ones(len(real), 1)) + bce(critic(fake), torch.zeros(len(real), 1))
            loss.backward()
            d_opt.step()
            g_opt.zero_grad()
            bce(critic(generator(z)), torch.ones(len(real), 1)).backward()
            g_opt.step()
    if rank == 0:
        torch.save(generator.module.state_dict(), "generator.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
