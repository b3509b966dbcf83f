"""The growth of kelp from three readings. The mean error leaves out one sample for each rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 16, 3


def readings(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 3, generator=g) * 2 - 1
    height = torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:]
    return TensorDataset(x, height + 0.05 * torch.randn(count, 1, generator=g))


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, held_out = readings(320, 1), readings(96, 2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH // ranks, sampler=sampler)
    x_test, y_test = (t[rank::ranks] for t in held_out.tensors)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            error = (model.module(x_test) - y_test).square().sum()
        dist.all_reduce(error)
        if rank == 0:
            print(f"epoch {epoch}: squared error {error.item() / (len(held_out) - ranks):.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
