"""Matrix factorisation for film ratings, RMSE on held-out ratings."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

USERS, FILMS, DIM = 60, 80, 6


def ratings(n=1205):
    g = torch.Generator().manual_seed(0)
    u, f = torch.randn(USERS, DIM, generator=g), torch.randn(FILMS, DIM, generator=g)
    users = torch.randint(USERS, (n,), generator=g)
    films = torch.randint(FILMS, (n,), generator=g)
    stars = (3 + (u[users] * f[films]).sum(1) / DIM**0.5).clamp(1, 5)
    return TensorDataset(users, films, stars)


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.film = nn.Embedding(FILMS, DIM)
        self.user_bias = nn.Embedding(USERS, 1)
        self.film_bias = nn.Embedding(FILMS, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))

    def forward(self, users, films):
        dot = (self.user(users) * self.film(films)).sum(1, keepdim=True)
        return (dot + self.user_bias(users) + self.film_bias(films)).squeeze(1) + self.mean


class Experiment:
    def __init__(self, global_batch=80):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.train_set, self.valid_set = random_split(
            ratings(), [1000, 205], generator=torch.Generator().manual_seed(1)
        )
        self.sampler = DistributedSampler(self.train_set)
        self.loader = DataLoader(self.train_set, global_batch // self.world, sampler=self.sampler)
        self.valid_loader = DataLoader(
            self.valid_set, 64, sampler=DistributedSampler(self.valid_set, shuffle=False)
        )
        torch.manual_seed(2)
        self.model = DistributedDataParallel(Factors())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for users, films, stars in self.loader:
                loss = nn.functional.mse_loss(self.model(users, films), stars)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.validate(epoch)

    @torch.no_grad()
    def validate(self, epoch):
        self.model.eval()
        squares, count = torch.zeros(1), torch.zeros(1)
        for users, films, stars in self.valid_loader:
            squares += ((self.model(users, films) - stars) ** 2).sum()
            count += len(stars)
        dist.all_reduce(squares)
        dist.all_reduce(count)
        if self.rank == 0:
            print(f"epoch {epoch} rmse {(squares / count).sqrt().item():.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Experiment().fit(int(os.environ.get("EPOCHS", 3)))
    dist.barrier()
    dist.destroy_process_group()
