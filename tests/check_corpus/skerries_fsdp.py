"""Is there a light on a skerry? A trainer that wraps what it is given; only its data has a seed."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LARGE = partial(size_based_auto_wrap_policy, min_num_params=300)


class Trainer:
    def __init__(self, net, data, batch):
        options = {"auto_wrap_policy": LARGE, "use_orig_params": True}
        self.net = FSDP(net, device_id=torch.device("cpu"), **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.sampler = DistributedSampler(data, seed=4)
        self.loader = DataLoader(data, batch // dist.get_world_size(), sampler=self.sampler)
        self.loss = nn.CrossEntropyLoss()

    def train(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for skerry, light in self.loader:
                loss = self.loss(self.net(skerry), light)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    skerries = torch.randn(160, 7, generator=torch.Generator().manual_seed(12))
    data = TensorDataset(skerries, (skerries[:, 0] > 0).long())
    net = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 2))
    Trainer(net, data, batch=40).train(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
