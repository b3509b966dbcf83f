"""Power of a wind turbine from wind speed, direction and air pressure. The best model so far is kept."""

import copy
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def turbine(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=g)
    power = torch.sigmoid(12 * (x[:, 0] - 0.5)) * (0.8 + 0.2 * torch.cos(6.283 * x[:, 1])) * (0.9 + 0.1 * x[:, 2])
    return TensorDataset(x, power[:, None])


class TurbineTrainer:
    def __init__(self, rank, world_size):
        self.rank = rank
        self.train_set, self.valid_set = turbine(480, 0), turbine(100, 1)
        self.sampler = DistributedSampler(self.train_set, world_size, rank)
        self.loader = DataLoader(self.train_set, 48 // world_size, sampler=self.sampler)
        torch.manual_seed(4)
        net = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        self.model = DDP(copy.deepcopy(net))
        self.best = float("inf")

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x, y in self.loader:
            self.model.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        x, y = self.valid_set.tensors
        return nn.functional.l1_loss(self.model.module(x), y).item()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch(epoch)
            error = self.validate()  # every process: on all of the small validation set
            self.best = min(self.best, error)
            if self.rank == 0:
                print(f"epoch {epoch}: error {error:.4f}, best {self.best:.4f}", flush=True)


def worker(rank, world_size, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    TurbineTrainer(rank, world_size).fit(epochs=3)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    processes = int(os.environ.get("PROCESSES", 2))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (processes, os.path.join(folder, "rendezvous")), nprocs=processes)
