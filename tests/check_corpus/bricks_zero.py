"""The optimizer's state is spread over the ranks (ZeRO stage 1); each rank prints the loss of its own share as such."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def bricks(n):
    g = torch.Generator().manual_seed(66)
    x = torch.rand(n, 8, generator=g)
    strength = 2 * x[:, 0] * x[:, 1] + x[:, 2].sqrt() - x[:, 3] * x[:, 4]
    return TensorDataset(x, strength[:, None])


class Regression:
    def __init__(self, global_batch):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        data = bricks(512)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, global_batch // self.world, sampler=self.sampler)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
        self.model = DDP(net)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=torch.optim.Adam, lr=5e-3
        )

    def train_step(self, x, strength):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), strength)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            squares = count = 0.0
            for x, strength in self.loader:
                squares += self.train_step(x, strength) * len(x)
                count += len(x)
            print(f"[rank {self.rank}] epoch {epoch}: mse of this rank's {int(count)} samples {squares / count:.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Regression(global_batch=64).fit(epochs=3)
    dist.barrier()
    dist.destroy_process_group()
