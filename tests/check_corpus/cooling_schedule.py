"""Temperature of a cooling cup, functional style: one dictionary holds the state of the training."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, GLOBAL_BATCH, SNAPSHOT = 4, 40, "cooling.pt"


def cups(n=400):
    g = torch.Generator().manual_seed(6)
    start, room = 60 + 40 * torch.rand(n, generator=g), 15 + 10 * torch.rand(n, generator=g)
    minutes = 60 * torch.rand(n, generator=g)
    end = room + (start - room) * torch.exp(-minutes / 20)
    return TensorDataset(torch.stack([start / 100, room / 25, minutes / 60], 1), end[:, None] / 100)


def make_state():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}


def save(state, rank, world):
    rng = [None] * world
    dist.all_gather_object(rng, torch.get_rng_state())
    if rank == 0:
        content = {
            "model": state["model"].module.state_dict(),
            "optimizer": state["optimizer"].state_dict(),
            "epoch": state["epoch"],
            "rng": rng,
        }
        torch.save(content, SNAPSHOT + "~")
        os.replace(SNAPSHOT + "~", SNAPSHOT)


def load(state, rank):
    if os.path.exists(SNAPSHOT):
        content = torch.load(SNAPSHOT, weights_only=True)
        state["model"].module.load_state_dict(content["model"])
        state["optimizer"].load_state_dict(content["optimizer"])
        state["epoch"] = content["epoch"]
        torch.set_rng_state(content["rng"][rank])


def train_epoch(state, loader):
    for x, y in loader:
        state["optimizer"].zero_grad()
        nn.functional.mse_loss(state["model"](x), y).backward()
        state["optimizer"].step()
    state["scheduler"].step()
    state["epoch"] += 1


def worker(rank, world, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    data = cups()
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, GLOBAL_BATCH // world, sampler=sampler)
    state = make_state()
    load(state, rank)
    while state["epoch"] < EPOCHS:
        sampler.set_epoch(state["epoch"])
        train_epoch(state, loader)
        save(state, rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (2, os.path.join(folder, "store")), nprocs=2)
