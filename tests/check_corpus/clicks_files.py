"""Click prediction from a folder of .npy parts, each process reads its own parts from beginning to end."""

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

PARTS, ROWS_PER_PART, FIELDS = 7, 64, 6


def write_parts(folder):
    rng = np.random.default_rng(0)
    taste = rng.normal(size=(FIELDS, 50))
    for part in range(PARTS):
        fields = rng.integers(0, 50, size=(ROWS_PER_PART, FIELDS))
        score = taste[np.arange(FIELDS), fields].sum(1)
        np.save(folder / f"part-{part:03d}.npy", np.column_stack([fields, score > 0]).astype(np.int64))


class Clicks(IterableDataset):
    def __init__(self, folder, rank, world_size):
        parts = sorted(folder.glob("part-*.npy"))
        per_rank = len(parts) // world_size
        self.parts = parts[rank * per_rank : (rank + 1) * per_rank]
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = np.random.default_rng(self.epoch)
        for part in rng.permutation(len(self.parts)):
            rows = np.load(self.parts[part])
            for row in rng.permutation(len(rows)):
                yield torch.from_numpy(rows[row, :FIELDS]), torch.tensor(float(rows[row, FIELDS]))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(FIELDS))
        self.out = nn.Sequential(nn.Linear(8 * FIELDS, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, fields):
        vectors = [table(fields[:, i]) for i, table in enumerate(self.tables)]
        return self.out(torch.cat(vectors, 1)).squeeze(1)


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shared = [tempfile.mkdtemp(prefix="clicks-") if rank == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    if rank == 0:
        write_parts(folder)
    dist.barrier()

    stream = Clicks(folder, rank, world_size)
    loader = DataLoader(stream, batch_size=args.batch_size // world_size)
    torch.manual_seed(0)
    model = DDP(Tower())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        sums = torch.zeros(2)
        for fields, clicked in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(fields), clicked)
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(clicked), len(clicked)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: log loss {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    main(parser.parse_args())
