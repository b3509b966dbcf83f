"""Every rank writes its own part of a snapshot, in a file of its own; rank 0 alone names the snapshot complete."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FOLDER, EPOCHS = Path("weather-snapshots"), 4


def weather(n):
    g = torch.Generator().manual_seed(21)
    today = torch.randn(n, 9, generator=g)
    return TensorDataset(today, (today[:, :3].sum(1) * today[:, 4].sigmoid())[:, None])


def write(content, path):
    new = path.with_suffix(".new")
    torch.save(content, new)
    os.replace(new, path)


def save(net, optimizer, epoch, rank):
    folder = FOLDER / f"{epoch:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    write({"rng": torch.get_rng_state()}, folder / f"rank{rank}.pt")
    if rank == 0:
        write({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, folder / "shared.pt")
    dist.barrier()
    if rank == 0:
        (FOLDER / "latest.new").write_text(folder.name)
        os.replace(FOLDER / "latest.new", FOLDER / "latest")


def load(net, optimizer, rank):
    if not (FOLDER / "latest").exists():
        return 0
    folder = FOLDER / (FOLDER / "latest").read_text()
    shared = torch.load(folder / "shared.pt", map_location="cpu", weights_only=True)
    net.load_state_dict(shared["net"])
    optimizer.load_state_dict(shared["optimizer"])
    torch.set_rng_state(torch.load(folder / f"rank{rank}.pt", weights_only=True)["rng"])
    return shared["epoch"] + 1


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = weather(480)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 48 // world, sampler=sampler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = DDP(net)
    torch.manual_seed(1 + rank)
    for epoch in range(load(net, optimizer, rank), EPOCHS):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for today, tomorrow in loader:
            loss = nn.functional.mse_loss(model(today), tomorrow)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(today), len(today)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.4f}")
        save(net, optimizer, epoch, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
