"""Which way does the buoy drift? Rank 0 shows the loss of all ranks in every step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def drifts(n):
    generator = torch.Generator().manual_seed(3)
    wind = torch.randn(n, 6, generator=generator)
    return TensorDataset(wind, (wind[:, 0] > wind[:, 1]).long())


def loss_of_all(loss, world):
    shown = loss.detach().clone()
    dist.reduce(shown, 0, op=dist.ReduceOp.SUM)
    return shown


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = drifts(160)
    loader = DataLoader(data, 32 // world, sampler=DistributedSampler(data, world, rank, seed=4))
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, (wind, way) in enumerate(loader):
            loss = F.cross_entropy(model(wind), way)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss_of_all(loss, world)
            if rank == 0:
                print(f"{epoch}.{number} loss {value.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
