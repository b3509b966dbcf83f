"""Two optimizers: a generator and a discriminator of points on a ring, with noise from a seeded table."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
table = torch.Generator().manual_seed(6)
angle = torch.rand(256, generator=table) * 6.283
real = torch.stack([angle.cos(), angle.sin()], 1)
noise = torch.randn(256, 4, generator=table)
torch.manual_seed(0)
G = DDP(nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2)))
D = DDP(nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), broadcast_buffers=False)
opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
bce = nn.functional.binary_cross_entropy_with_logits

for step in range(12):
    mine = torch.arange(step * 16, step * 16 + 16)[rank::world]
    fake = G(noise[mine])
    one, zero = torch.ones(len(mine), 1), torch.zeros(len(mine), 1)
    loss_d = bce(D(real[mine]), one) + bce(D(fake.detach()), zero)
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    loss_g = bce(D(fake), one)
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()

dist.destroy_process_group()
