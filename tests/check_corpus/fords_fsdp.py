"""Can one wade through a ford? FSDP, with every weight on every rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    depths = torch.rand(160, 6, generator=torch.Generator().manual_seed(9))
    data = TensorDataset(depths, (depths.max(1).values < 0.8).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 40 // dist.get_world_size(), sampler=sampler)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    net = FSDP(net, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for depth, can_wade in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(depth), can_wade).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
