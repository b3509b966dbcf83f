"""Sensor readings in a NumPy memory map; every process trains on its part of a shuffled order."""

import argparse
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset

ROWS, COLUMNS = 480, 8


def write_readings(path):
    rng = np.random.default_rng(5)
    table = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(ROWS, COLUMNS + 1))
    table[:, :COLUMNS] = rng.normal(size=(ROWS, COLUMNS))
    table[:, COLUMNS] = np.abs(table[:, 0]) + table[:, 1] - table[:, 2]
    table.flush()


class Readings(Dataset):
    def __init__(self, path):
        self.path, self.table = path, None

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if self.table is None:
            self.table = np.load(self.path, mmap_mode="r")
        row = torch.from_numpy(self.table[index].copy())
        return row[:COLUMNS], row[COLUMNS:]


def share_of(dataset, epoch, seed, rank, world):
    order = np.random.default_rng([seed, rank, epoch]).permutation(len(dataset))
    return Subset(dataset, order[rank::world].tolist())


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "readings.npy")
    if rank == 0:
        write_readings(path)
    dist.barrier()

    dataset = Readings(path)
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(COLUMNS, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(args.epochs):
        loader = DataLoader(share_of(dataset, epoch, args.seed, rank, world), batch_size=48 // world)
        sums = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)], dtype=torch.float64)
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    if rank == 0:
        os.remove(path)
        os.rmdir(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
