"""A data loader's worker of rank 1 ends, or cannot send its batch: HOW says why."""

import os
import signal
import socket
import sys
from multiprocessing import resource_sharer

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

HOW = sys.argv[1]


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if HOW == "full":  # of 8 MB in a batch
            return torch.full((1 << 20,), float(index)), index
        if index == 40 and dist.get_rank() == 1:
            if HOW == "deaf":
                close_connection_early()
            if HOW in ("killed", "deaf"):
                os.kill(os.getpid(), signal.SIGKILL)
            return lambda: "which cannot be pickled"
        return torch.tensor(float(index))


def close_connection_early():
    """Connect as a rank does that wants a tensor, and close, as one does that ends meanwhile."""
    resource_sharer.DupFd(0)  # starts the thread that listens
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(resource_sharer._resource_sharer._address)
    resource_sharer.stop()


def collate(samples):
    return samples if callable(samples[0]) else torch.utils.data.default_collate(samples)


dist.init_process_group("gloo")
for _ in DataLoader(Samples(), 4 if HOW == "full" else 1, num_workers=2, collate_fn=collate):
    dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
