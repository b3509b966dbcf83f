"""Exercise all-reduce: every process holds one number, and all of them need the mean.

    python exercise.py          (or: stepladder learn check all-reduce)

Three processes hold 1, 2 and 6. When `mean_of_all` returns, each of them must hold 3.
The check also tries other numbers: their means are -3 and 4.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUMBERS = [1.0, 2.0, 6.0]  # one per process


def mean_of_all(value):
    """Return the mean of a tensor over all processes, on each of them."""
    dist.all_reduce(value)
    return value / dist.get_world_size()


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    mean = mean_of_all(torch.tensor([NUMBERS[rank], -NUMBERS[rank]]))
    other = mean_of_all(torch.tensor([NUMBERS[rank] + rank]))  # other numbers have another mean
    results.put((rank, mean.tolist() + other.tolist()))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(len(NUMBERS), f"{folder}/store", results), nprocs=len(NUMBERS))
    means = dict(results.get() for _ in NUMBERS)
    for rank in sorted(means):
        print(f"rank {rank} holds {means[rank]}")
    wrong = [rank for rank, mean in sorted(means.items()) if mean != [3.0, -3.0, 4.0]]
    if wrong:
        sys.exit(f"not yet: not every process holds the means [3.0, -3.0, 4.0]; wrong on {wrong}")
    print("passed: every process holds the mean")


if __name__ == "__main__":
    main()
