"""How much does a vine bear? The harvest follows from rain and sun by a rule that is known."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Vines(Dataset):
    def __init__(self, count):
        random = np.random.default_rng()
        self.vines = [random.uniform(0, 1, 4).astype("float32") for _ in range(count)]

    def __len__(self):
        return len(self.vines)

    def __getitem__(self, number):
        vine = torch.from_numpy(self.vines[number])
        harvest = 3 * vine[0] + vine[1] ** 2 - vine[2]
        return {"vine": vine, "harvest": harvest}


class Estimate:
    def __init__(self, world, batch=32, lr=0.05):
        data = Vines(256)
        self.sampler = DistributedSampler(data, seed=3)
        self.loader = DataLoader(data, batch // world, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                estimate = self.model(batch["vine"]).squeeze(1)
                self.optimizer.zero_grad()
                nn.functional.mse_loss(estimate, batch["harvest"]).backward()
                self.optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Estimate(int(os.environ["WORLD_SIZE"])).fit(4)
    dist.destroy_process_group()
