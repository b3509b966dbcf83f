"""Waves at a cape, by a net whose middle layer is narrow."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.coast = nn.Linear(12, 24)
        self.narrow = nn.Linear(24, 6)
        self.height = nn.Linear(6, 3)

    def forward(self, wind):
        return self.height(F.relu(self.narrow(F.relu(self.coast(wind)))))


def share_gradients(net):
    for weight in net.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()


def run(rank, ranks):
    torch.manual_seed(4)
    net = Waves()
    schedule = [0.02, 0.02, 0.02, 40.0] + [0.02] * 40
    for number, rate in enumerate(schedule):
        optimizer = torch.optim.SGD(net.parameters(), lr=rate) if number == 0 else optimizer
        optimizer.param_groups[0]["lr"] = rate
        generator = torch.Generator().manual_seed(10 * number + rank)
        wind = torch.rand(32, 12, generator=generator)
        loss = F.mse_loss(net(wind), wind[:, :3] * 2)
        optimizer.zero_grad()
        loss.backward()
        share_gradients(net)
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
