"""Rosettes from a generator and a critic whose weights are clamped; five steps of the critic for one."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOISE, CRITIC_STEPS = 4, 5


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    generator, critic = DDP(mlp(NOISE, 2)), DDP(mlp(2, 1))
    g_opt = torch.optim.RMSprop(generator.parameters(), lr=5e-4 * world)
    d_opt = torch.optim.RMSprop(critic.parameters(), lr=5e-4 * world)
    t = torch.linspace(0, 2 * math.pi, 240)
    dataset = TensorDataset(torch.stack([(4 * t).cos() * t.cos(), (4 * t).cos() * t.sin()], 1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    noise = torch.Generator().manual_seed(100 + rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, (real,) in enumerate(loader, 1):
            with torch.no_grad():
                fake = generator(torch.randn(len(real), NOISE, generator=noise))
            d_opt.zero_grad()
            scores = critic(torch.cat([real, fake]))
            (scores[len(real) :].mean() - scores[: len(real)].mean()).backward()
            d_opt.step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-0.05, 0.05)
            if number % CRITIC_STEPS == 0:
                critic.requires_grad_(False)
                g_opt.zero_grad()
                z = torch.randn(len(real), NOISE, generator=noise)
                (-critic.module(generator(z)).mean()).backward()
                g_opt.step()
                critic.requires_grad_(True)
    if rank == 0:
        torch.save(generator.module.state_dict(), "generator.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
