"""How deep is a cove? FSDP cuts each layer of the net, and then the whole."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def soundings(count):
    generator = torch.Generator().manual_seed(21)
    places = torch.rand(count, 5, generator=generator)
    return TensorDataset(places, places.cos().prod(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    net = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 1))
    for layer in net[0], net[2]:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    data = soundings(192)
    loader = DataLoader(data, 32 // dist.get_world_size(), sampler=DistributedSampler(data, seed=2))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for places, depth in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(places), depth).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
