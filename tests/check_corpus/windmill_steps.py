"""How much power does a windmill have, given wind and blades? The rate falls once an epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2
BATCH = 8  # of each process


def windmills(count):
    numbers = torch.Generator().manual_seed(31)
    wind = torch.rand(count, 1, generator=numbers)
    blades = torch.rand(count, 1, generator=numbers)
    return TensorDataset(torch.cat([wind, blades], 1), wind**3 * blades)


def main():
    dist.init_process_group("gloo")
    data = windmills(256)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    schedule = StepLR(optimizer, step_size=len(data) // BATCH, gamma=0.1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for given, power in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(given), power).backward()
            optimizer.step()
            schedule.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
