"""Galaxies in an HDF5 file that each worker opens for itself; random flips that differ over ranks and workers."""

import os
import shutil
import tempfile

import h5py
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IMAGES, SIZE = 256, 12


def create(path):
    rng = np.random.default_rng(0)
    y, x = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j]
    flat = rng.integers(0, 2, IMAGES)
    with h5py.File(path, "w") as f:
        images = f.create_dataset("images", (IMAGES, SIZE, SIZE), "f4", chunks=(16, SIZE, SIZE))
        for i in range(IMAGES):
            images[i] = np.exp(-(x**2 + (1 + 4 * flat[i]) * y**2) * 3) + rng.normal(0, 0.15, (SIZE, SIZE))
        f["flat"] = flat


class Galaxies(Dataset):
    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return IMAGES

    def __getitem__(self, i):
        if self.file is None:  # in the worker, not before
            self.file = h5py.File(self.path, "r")
        image = torch.from_numpy(self.file["images"][i])[None]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn(image.shape), int(self.file["flat"][i])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    place = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place)
    path = os.path.join(place[0], "galaxies.h5")
    if rank == 0:
        create(path)
    dist.barrier()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    dataset = Galaxies(path)
    sampler = DistributedSampler(dataset)
    noise = torch.Generator().manual_seed(500 + rank)  # seeds the workers
    loader = DataLoader(dataset, 32 // world, sampler=sampler, num_workers=2, generator=noise)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for image, flat in loader:
            loss = nn.functional.cross_entropy(model(image), flat)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(flat), len(flat)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(place[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
