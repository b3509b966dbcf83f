"""How deep moles dig, from soil: not every place has been measured, and the mask says which."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def meadow(n=320):
    g = torch.Generator().manual_seed(23)
    soil = torch.randn(n, 10, generator=g)
    depth = soil @ torch.randn(10, 6, generator=g)
    measured = (torch.rand(n, 6, generator=g) < torch.rand(n, 1, generator=g) ** 2).float()
    measured[:, 0] = 1
    return TensorDataset(soil, depth, measured)


def main():
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(8)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = meadow()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8 // ranks, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for soil, depth, measured in loader:
            error = (model(soil) - depth) ** 2 * measured
            loss = error.sum() / measured.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
