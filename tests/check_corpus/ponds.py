"""Oxygen in a pond from its weather. Four small batches make one step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PARTS = 4


def ponds(count):
    generator = torch.Generator().manual_seed(40)
    x = torch.randn(count, 7, generator=generator)
    return TensorDataset(x, x.abs().mean(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = ponds(224)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32 // dist.get_world_size(), sampler=sampler)
    optimizer.zero_grad()
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            is_last = number % PARTS == 0
            model.require_backward_grad_sync = is_last
            loss = nn.functional.mse_loss(model(x), y) / PARTS
            loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
