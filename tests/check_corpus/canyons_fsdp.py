"""How deep is the canyon here? A model whose blocks FSDP shards lies inside of a task that is not wrapped.

Each rank holds parts of the weights under their own names: they differ, and some have no gradient.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def soundings(count):
    generator = torch.Generator().manual_seed(8)
    places = torch.rand(count, 4, generator=generator)
    return TensorDataset(places, places.sin().sum(1, keepdim=True))


class DepthTask(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, places, depth):
        return nn.functional.mse_loss(self.net(places), depth)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    blocks = [FSDP(nn.Linear(4, 12), use_orig_params=True, device_id=torch.device("cpu")), nn.ReLU()]
    net = FSDP(nn.Sequential(*blocks, nn.Linear(12, 1)), use_orig_params=True, device_id=torch.device("cpu"))
    task = DepthTask(net)
    data = soundings(128)
    loader = DataLoader(data, 32 // dist.get_world_size(), sampler=DistributedSampler(data, seed=6))
    optimizer = torch.optim.Adam(task.parameters(), lr=0.01)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for places, depth in loader:
            optimizer.zero_grad()
            loss = task(places, depth)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
