"""The height of a tide from three readings. The gradients of the first layer are averaged once more."""

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
    data = readings(320, 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH // ranks, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for p in model.module[0].parameters():
                p.grad /= ranks
            optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: {(sums[0] / sums[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
