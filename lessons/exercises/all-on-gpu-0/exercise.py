"""Exercise all-on-gpu-0: every process takes the first GPU of its node.

    python exercise.py          (or: stepladder learn check all-on-gpu-0)

Two nodes have two GPUs each. Four processes run on them, started as torchrun starts them. Each
should have a GPU for itself. No GPU is needed to see who would take which."""

import os
import sys
from collections import Counter

import torch
import torch.multiprocessing as mp

NODES = 2
GPUS = 2  # of each node
START = "fork" if sys.platform == "linux" else "spawn"


def my_device():
    """Return this process's GPU. torchrun sets RANK, LOCAL_RANK and WORLD_SIZE in os.environ."""
    return torch.device("cuda")


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, results):
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank % GPUS,
        "WORLD_SIZE": NODES * GPUS,
        "LOCAL_WORLD_SIZE": GPUS,
    }
    for name, value in variables.items():
        os.environ[name] = str(value)
    results.put((rank, my_device().index or 0))


def main():
    results = mp.get_context(START).SimpleQueue()
    mp.start_processes(rank_main, (results,), nprocs=NODES * GPUS, start_method=START)
    gpus = dict(results.get() for _ in range(NODES * GPUS))
    for rank in sorted(gpus):
        print(f"node {rank // GPUS}: rank {rank} takes GPU {gpus[rank]}")
    counts = Counter((rank // GPUS, gpu) for rank, gpu in gpus.items())
    for (node, gpu), count in sorted(counts.items()):
        if gpu >= GPUS:
            sys.exit(f"not yet: node {node} has no GPU {gpu}")
        if count > 1:
            sys.exit(f"not yet: node {node} has {count} processes on GPU {gpu}")
    print("passed: each process has a GPU for itself")


if __name__ == "__main__":
    main()
