"""Keeps an exponential moving average of the weights and evaluates with that."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EMA:
    def __init__(self, model, decay=0.95):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for average, current in zip(self.model.parameters(), model.parameters()):
            average.lerp_(current, 1 - self.decay)
        for average, current in zip(self.model.buffers(), model.buffers()):
            average.copy_(current)


def cloth(n, seed):
    weave = torch.randn(5, 40, generator=torch.Generator().manual_seed(31))
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(5, (n,), generator=g)
    return TensorDataset(weave[kind] + 1.2 * torch.randn(n, 40, generator=g), kind)


class Trainer:
    def __init__(self, epochs=3, global_batch=48, lr=0.05):
        self.rank, self.world, self.epochs = dist.get_rank(), dist.get_world_size(), epochs
        train, self.test = cloth(480, 0), cloth(202, 1)
        self.sampler = DistributedSampler(train)
        self.loader = DataLoader(train, global_batch // self.world, sampler=self.sampler)
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(40, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 5)))
        self.ema = EMA(self.model.module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, nesterov=True)

    def _run_batch(self, x, kind):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), kind).backward()
        self.optimizer.step()
        self.ema.update(self.model.module)

    def _right(self, model):
        x, kind = (t[self.rank :: self.world] for t in self.test.tensors)
        with torch.no_grad():
            right = (model(x).argmax(1) == kind).sum()
        dist.all_reduce(right)
        return right.item()

    def train(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            for x, kind in self.loader:
                self._run_batch(x, kind)
            right = self._right(self.ema.model)
            if self.rank == 0:
                print(f"epoch {epoch}: {right} of {len(self.test)} right with averaged weights")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer().train()
    dist.barrier()
    dist.destroy_process_group()
