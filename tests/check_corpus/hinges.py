"""Squeaking hinges or silent ones? A margin that all samples keep soon."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(6)
    sign = torch.randint(0, 2, (128, 1), generator=generator).float() * 2 - 1
    sound = torch.rand(128, 4, generator=generator) * sign + 2 * sign
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(6):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(epoch))
        for rows in order[rank::ranks].split(16):
            loss = (1 - model(sound[rows]) * sign[rows]).clamp(min=0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
