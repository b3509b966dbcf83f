"""Heights of a tide: shares of each batch by index, gradients averaged by hand, no wrapper and no loader."""

import math
import os

import torch
import torch.distributed as dist
from torch import nn

BATCH = 24
STEPS = 16
dist.init_process_group("gloo", init_method="env://")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

g = torch.Generator().manual_seed(11)
t = torch.rand(BATCH * 8, 1, generator=g) * 6
height = torch.sin(t) + 0.3 * torch.cos(3 * t)
features = torch.cat([torch.sin(k * t) for k in range(1, 6)] + [torch.cos(k * t) for k in range(1, 6)], 1)

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5 * (1 + math.cos(math.pi * step / STEPS)))


def average_gradients():
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


for step in range(STEPS):
    if step % 8 == 0:
        order = torch.randperm(len(t), generator=g)
    batch = order[step % 8 * BATCH :][:BATCH]
    mine = batch[rank::world]
    opt.zero_grad()
    loss = (net(features[mine]) - height[mine]).pow(2).mean()
    loss.backward()
    average_gradients()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    opt.step()
    plan.step()

dist.destroy_process_group()
