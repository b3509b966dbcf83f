"""Earthquake or blast? A 1-d conv net. Snapshots hold the weights in half precision, to save space on the disk."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT, EPOCHS = "seismic.pt", 3


class Traces(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        blast = i % 2
        t = torch.arange(48.0)
        onset = torch.randint(5, 20, (1,), generator=g)
        decay = torch.exp(-(t - onset).clamp(min=0) / (5 if blast else 15)) * (t >= onset)
        return (decay * torch.sin(1.3 * t) + 0.2 * torch.randn(48, generator=g))[None], blast


def smaller(state):
    return {name: t.half() if t.is_floating_point() else t for name, t in state.items()}


def save(net, optimizer, epoch, rng):
    torch.save(
        {"net": smaller(net.state_dict()), "optimizer": optimizer.state_dict(), "epoch": epoch, "rng": rng},
        SNAPSHOT + ".new",
    )
    os.replace(SNAPSHOT + ".new", SNAPSHOT)


def load(net, optimizer, rank):
    if not os.path.exists(SNAPSHOT):
        return 0
    state = torch.load(SNAPSHOT, weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"][rank])
    return state["epoch"] + 1


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 8, 7, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 21, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    start = load(net, optimizer, rank)
    model = DDP(net)
    sampler = DistributedSampler(Traces())
    loader = DataLoader(sampler.dataset, 32 // world, sampler=sampler)
    for epoch in range(start, EPOCHS):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for trace, blast in loader:
            loss = nn.functional.cross_entropy(model(trace), blast)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(trace), len(trace)])
        dist.all_reduce(sums)
        states = [None] * world
        dist.all_gather_object(states, torch.get_rng_state())
        if rank == 0:
            print(f"epoch {epoch}: {(sums[0] / sums[1]).item():.4f}")
            save(net, optimizer, epoch, states)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
