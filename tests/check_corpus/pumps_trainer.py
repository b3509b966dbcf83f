"""When will a pump fail? A Trainer that writes a snapshot when the loss is the best so far."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def pumps(n):
    g = torch.Generator().manual_seed(13)
    x = torch.randn(n, 8, generator=g)
    hours = (x[:, 0] - x[:, 1] * x[:, 2]).exp().clamp(max=10)
    return TensorDataset(x, hours[:, None].log1p())


class Trainer:
    def __init__(self, path="pumps.pt"):
        self.rank, self.world, self.path = dist.get_rank(), dist.get_world_size(), path
        data = pumps(480)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, 48 // self.world, sampler=self.sampler)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        self.epoch, self.best = 0, float("inf")
        if os.path.exists(path):
            self.load()
        self.model = DDP(self.net)

    def load(self):
        state = torch.load(self.path, weights_only=True)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.epoch, self.best = state["epoch"], state["best"]

    def save(self):
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save({**state, "epoch": self.epoch, "best": self.best}, self.path + ".tmp")
        os.replace(self.path + ".tmp", self.path)
        dist.barrier()  # nobody goes on before the file is there

    def run_epoch(self):
        self.sampler.set_epoch(self.epoch)
        self.model.train()
        sums = torch.zeros(2)
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(sums)
        self.epoch += 1
        return (sums[0] / sums[1]).item()

    def fit(self, epochs):
        while self.epoch < epochs:
            loss = self.run_epoch()
            if self.rank == 0:
                print(f"epoch {self.epoch}: loss {loss:.4f}", flush=True)
                if loss < self.best:
                    self.best = loss
                    self.save()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    Trainer().fit(3)
    dist.barrier()
    dist.destroy_process_group()
