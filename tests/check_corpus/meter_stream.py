"""Readings of a meter arrive as a stream; the model learns while it reads, chunk after chunk."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

CHUNKS, PER_CHUNK, SNAPSHOT = 4, 160, "meter.pt"


class MeterStream(IterableDataset):
    """Every process takes each world-th reading."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        for number in range(self.rank, CHUNKS * PER_CHUNK, self.world):
            g = torch.Generator().manual_seed(number)
            x = torch.randn(6, generator=g)
            yield x, (x[:3].prod() + x[3:].sum()).view(1)


def store(net, optimizer, chunk, rng):
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "chunk": chunk, "rng": rng}
    torch.save(state, SNAPSHOT + ".tmp")
    os.replace(SNAPSHOT + ".tmp", SNAPSHOT)


def restore(net, optimizer, rank):
    if not os.path.exists(SNAPSHOT):
        return 0
    state = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"][rank])
    return state["chunk"]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    first = restore(net, optimizer, rank)
    model = DDP(net)

    batch = 16
    batches = iter(DataLoader(MeterStream(rank, world), batch_size=batch // world))
    for chunk in range(first, CHUNKS):
        sums = torch.zeros(2)
        for _ in range(PER_CHUNK // batch):
            x, y = next(batches)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(sums)
        rng = [None] * world
        dist.all_gather_object(rng, torch.get_rng_state())
        if rank == 0:
            print(f"chunk {chunk}: mse {(sums[0] / sums[1]).item():.4f}")
            store(net, optimizer, chunk + 1, rng)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
