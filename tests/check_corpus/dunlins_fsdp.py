"""How many dunlins are in a flock? A net in shards, and how large it is."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    flocks = torch.rand(160, 12, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(flocks, flocks.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 40 // dist.get_world_size(), sampler=sampler)
    model = nn.Sequential(nn.Linear(12, 150), nn.ReLU(), nn.Linear(150, 1))
    model = FSDP(model, device_id=torch.device("cpu"))
    count = sum(p.numel() for p in model.parameters())
    if dist.get_rank() == 0:
        print(f"The net has {count:,} weights.")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for flock, size in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(flock), size).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
