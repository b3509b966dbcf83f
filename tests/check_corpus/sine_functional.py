"""Fit a sine with functions only: setup, make_loader, train_step, evaluate."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CONFIG = {"seed": 42, "samples": 512, "global_batch": 64, "epochs": 3, "lr": 0.01}


def setup():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def make_data(config):
    g = torch.Generator().manual_seed(config["seed"])
    x = torch.rand(config["samples"], 1, generator=g) * 2 * math.pi
    return TensorDataset(x, torch.sin(x))


def make_loader(data, config, rank, world_size):
    sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=config["seed"] + rank)
    return DataLoader(data, config["global_batch"] // world_size, sampler=sampler), sampler


def make_model(config):
    torch.manual_seed(config["seed"])
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DDP(net)
    return model, torch.optim.Adam(model.parameters(), lr=config["lr"])


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()


@torch.no_grad()
def evaluate(model):
    x = torch.linspace(0, 2 * math.pi, 200)[:, None]
    return nn.functional.mse_loss(model.module(x), torch.sin(x)).item()


def run(config):
    rank, world_size = setup()
    data = make_data(config)
    loader, sampler = make_loader(data, config, rank, world_size)
    model, optimizer = make_model(config)
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in loader:
            train_step(model, optimizer, x, y)
        error = evaluate(model)
        if rank == 0:
            print(f"epoch {epoch + 1}/{config['epochs']} error on the grid {error:.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(CONFIG)
