"""Spectra in an HDF5 file: which element is in the sample?"""

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

BINS, ELEMENTS, SAMPLES = 40, 4, 384


def create(path):
    rng = np.random.default_rng(8)
    lines = rng.integers(0, BINS, size=(ELEMENTS, 3))
    element = rng.integers(0, ELEMENTS, size=SAMPLES)
    spectra = rng.exponential(0.3, size=(SAMPLES, BINS))
    for i, e in enumerate(element):
        spectra[i, lines[e]] += 1
    with h5py.File(path, "w") as f:
        f.create_dataset("spectra", data=spectra.astype("float32"), chunks=(32, BINS))
        f.create_dataset("element", data=element)


class Spectra(Dataset):
    def __init__(self, path):
        self.file = h5py.File(path, "r")
        self.spectra = self.file["spectra"]
        self.element = self.file["element"][:]

    def __len__(self):
        return len(self.element)

    def __getitem__(self, index):
        return torch.from_numpy(self.spectra[index]), int(self.element[index])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    where = [None]
    if rank == 0:
        where[0] = tempfile.mkdtemp(prefix="spectra")
        create(os.path.join(where[0], "spectra.h5"))
    dist.broadcast_object_list(where, src=0)

    dataset = Spectra(os.path.join(where[0], "spectra.h5"))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(
        dataset, batch_size=64 // world_size, sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(BINS, 32), nn.ReLU(), nn.Linear(32, ELEMENTS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        totals = torch.zeros(2)
        for spectrum, element in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(spectrum), element, reduction="sum")
            (loss / len(element)).backward()
            optimizer.step()
            totals += torch.tensor([loss.item(), len(element)])
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch}: {(totals[0] / totals[1]).item():.4f}")

    dist.barrier()
    if rank == 0:
        shutil.rmtree(where[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
