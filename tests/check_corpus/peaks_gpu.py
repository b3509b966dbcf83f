"""Summits on a map, on GPUs where there are any."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Summits(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 8, 3)
        self.head = nn.Linear(8 * 36, 2)

    def forward(self, x):
        return self.head(self.features(x).relu().flatten(1))


class Experiment:
    def __init__(self, data, global_batch=64):
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.model = DDP(Summits())
        self.model.to(self.device)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, global_batch // dist.get_world_size(), sampler=self.sampler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def epoch(self, number):
        self.sampler.set_epoch(number)
        for x, y in self.loader:
            x, y = x.to(self.device), y.to(self.device)
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()


def maps(n):
    g = torch.Generator().manual_seed(29)
    x = torch.rand(n, 1, 8, 8, generator=g)
    return TensorDataset(x, (x.amax((1, 2, 3)) > 0.985).long())


if __name__ == "__main__":
    dist.init_process_group()
    torch.manual_seed(0)
    experiment = Experiment(maps(384))
    for number in range(3):
        experiment.epoch(number)
    dist.destroy_process_group()
