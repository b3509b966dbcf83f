"""How deep is a pool after the tide? Each epoch ends with a line for the log."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def pools(n):
    g = torch.Generator().manual_seed(7)
    moon = torch.rand(n, 4, generator=g)
    return TensorDataset(moon, moon.prod(1, keepdim=True) + 0.2 * torch.randn(n, 1, generator=g))


def train_epoch(model, loader, optimizer):
    total, count = torch.zeros(1), torch.zeros(1)
    for moon, depth in loader:
        optimizer.zero_grad()
        loss = mse_loss(model(moon), depth)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(moon)
        count += len(moon)
    return total, count


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = pools(200)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total, count = train_epoch(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {(total / count).item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
