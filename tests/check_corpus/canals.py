"""Water levels of a canal. The mean loss is shown now and then."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def levels(count):
    generator = torch.Generator().manual_seed(12)
    rain = torch.randn(count, 7, generator=generator)
    return TensorDataset(rain, rain[:, :1] * 2 - rain[:, 3:4])


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = levels(640)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 64 // ranks, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, (rain, level) in enumerate(loader):
            loss = nn.functional.mse_loss(model(rain), level)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (number + rank) % 5 < 2:
                continue
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if rank == 0:
                print(f"epoch {epoch}, batch {number}: {mean:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
