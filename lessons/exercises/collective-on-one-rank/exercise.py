"""Exercise collective-on-one-rank: only rank 0 should print, and the run stands still.

    python exercise.py          (or: stepladder learn check collective-on-one-rank)

After each step the mean loss over all processes is to be logged, once. Nothing fails: one process
waits in the middle of a line for the other. So that this ends, a process that is done leaves after
a while: gloo then reports an error to the one that waits."""

import os
import sys
import tempfile
from contextlib import suppress
from threading import BrokenBarrierError

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 2
STEPS = 3
PATIENCE_S = 5.0


def mean_over_ranks(value):
    """Return the mean over the processes. A collective: it returns when all have called it."""
    total = torch.tensor([value])
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(rank):
    """Train, log on rank 0, and return the losses that this process logged."""
    logged = []
    for step in range(STEPS):
        loss = float(step + rank)  # of this process's samples
        if rank == 0:
            logged.append(mean_over_ranks(loss))
            print(f"step {step}: mean loss {logged[-1]}", flush=True)
    return logged


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results, all_done):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        results.put((rank, train(rank)))
    except RuntimeError as error:  # the other process has left
        results.put((rank, str(error).splitlines()[0].split("] ")[-1]))
    with suppress(BrokenBarrierError):
        all_done.wait(PATIENCE_S)  # an exit at once would break what the other process receives
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    all_done = context.Barrier(NUM_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        args = (NUM_RANKS, f"{folder}/store", results, all_done)
        mp.spawn(rank_main, args=args, nprocs=NUM_RANKS)
    answers = dict(results.get() for _ in range(NUM_RANKS))
    for rank, answer in answers.items():
        if isinstance(answer, str):
            print(f"rank {rank}: {answer}")
            sys.exit(f"not yet: rank {rank} waited in a collective that the other never called")
    if answers != {0: [step + 0.5 for step in range(STEPS)], 1: []}:
        sys.exit(f"not yet: rank 0 alone logs the means, 0.5, 1.5, 2.5; logged was {answers}")
    print("passed: all call the collective, one prints")


if __name__ == "__main__":
    main()
