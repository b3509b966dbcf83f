"""A recommender that ranks: which of two items does a user prefer? One GPU per process."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

USERS, ITEMS, DIM = 40, 60, 8


class Preference(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, DIM)
        self.items = nn.Embedding(ITEMS, DIM)

    def forward(self, user, first, second):
        u = self.users(user)
        return (u * (self.items(first) - self.items(second))).sum(1)


def choices(n=1000):
    g = torch.Generator().manual_seed(0)
    u, v = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    user = torch.randint(USERS, (n,), generator=g)
    first, second = torch.randint(ITEMS, (2, n), generator=g)
    preferred = ((u[user] * (v[first] - v[second])).sum(1) > 0).float()
    return TensorDataset(user, first, second, preferred)


class Recommender:
    def __init__(self):
        self.cuda = torch.cuda.is_available()
        local_rank = int(os.environ["LOCAL_RANK"])
        if self.cuda:
            torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", local_rank) if self.cuda else torch.device("cpu")
        train, valid = random_split(choices(), [800, 200], torch.Generator().manual_seed(1))
        self.sampler = DistributedSampler(train)
        self.train_loader = DataLoader(train, 80 // self.world, sampler=self.sampler, pin_memory=self.cuda)
        valid_sampler = DistributedSampler(valid, shuffle=False)
        self.valid_loader = DataLoader(valid, 100 // self.world, sampler=valid_sampler)
        torch.manual_seed(0)
        model = Preference().to(self.device)
        self.model = DDP(model, device_ids=[local_rank] if self.cuda else None)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.criterion = nn.BCEWithLogitsLoss()

    def _loss(self, batch):
        user, first, second, preferred = (t.to(self.device, non_blocking=True) for t in batch)
        return self.criterion(self.model(user, first, second), preferred)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for batch in self.train_loader:
            self.optimizer.zero_grad(set_to_none=True)
            self._loss(batch).backward()
            self.optimizer.step()

    @torch.no_grad()
    def valid_epoch(self, epoch):
        self.model.eval()
        total, seen = 0.0, 0
        for batch in self.valid_loader:
            total += self._loss(batch).item() * len(batch[0])
            seen += len(batch[0])
        if self.rank == 0:
            print(f"epoch {epoch} | validation loss {total / seen:.4f}")


if __name__ == "__main__":
    recommender = Recommender()
    for epoch in range(3):
        recommender.train_epoch(epoch)
        recommender.valid_epoch(epoch)
    dist.barrier()
    dist.destroy_process_group()
