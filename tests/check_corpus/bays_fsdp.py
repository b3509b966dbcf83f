"""How salty is the water of a bay? A net in two shards, whose gradients have a limit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CPU = torch.device("cpu")


def bays(count):
    generator = torch.Generator().manual_seed(31)
    x = torch.rand(count, 6, generator=generator)
    return TensorDataset(x, x.prod(1, keepdim=True).sqrt())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1)), device_id=CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = bays(256)
    loader = DataLoader(data, 64 // dist.get_world_size(), sampler=DistributedSampler(data, seed=1))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
