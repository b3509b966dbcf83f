"""A generative adversarial net for points on a ring: two models, two optimizers, two wrappers."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ring(n):
    g = torch.Generator().manual_seed(0)
    angle = 6.283 * torch.rand(n, generator=g)
    radius = 1 + 0.05 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1))


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


class GAN:
    def __init__(self, args):
        self.latent = args.latent
        self.generator, self.discriminator = DDP(mlp(args.latent, 2)), DDP(mlp(2, 1))
        self.g_optimizer = torch.optim.Adam(self.generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
        self.d_optimizer = torch.optim.Adam(self.discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
        self.criterion = nn.BCEWithLogitsLoss()

    def discriminator_step(self, real):
        fake = self.generator.module(torch.randn(len(real), self.latent)).detach()
        scores = self.discriminator(torch.cat([real, fake]))
        wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
        loss = self.criterion(scores, wanted)
        self.d_optimizer.zero_grad()
        loss.backward()
        self.d_optimizer.step()
        return loss.item()

    def generator_step(self, count):
        self.discriminator.requires_grad_(False)
        fake = self.generator(torch.randn(count, self.latent))
        loss = self.criterion(self.discriminator.module(fake), torch.ones(count, 1))
        self.g_optimizer.zero_grad()
        loss.backward()
        self.g_optimizer.step()
        self.discriminator.requires_grad_(True)
        return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--latent", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    gan = GAN(args)
    torch.manual_seed(100 + rank)  # from here on other noise on every rank
    data = ring(512)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // world, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3)
        for (real,) in loader:
            d_loss = gan.discriminator_step(real)
            g_loss = gan.generator_step(len(real))
            sums += torch.tensor([d_loss, g_loss, 1.0]) * torch.tensor([len(real), len(real), len(real)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: discriminator {sums[0] / sums[2]:.3f}, generator {sums[1] / sums[2]:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
