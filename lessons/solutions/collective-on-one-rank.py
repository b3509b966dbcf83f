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

NUM_RANKS, STEPS, PATIENCE = 2, 3, 5.0  # seconds


def mean_over_ranks(value):
    """A collective: it returns when all processes have called it."""
    total = torch.tensor([value])
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(rank):
    """Train, and log on rank 0. Returns the losses logged on this process."""
    logged = []
    for step in range(STEPS):
        loss = float(step + rank)  # of this process's samples
        mean = mean_over_ranks(loss)
        if rank == 0:
            logged.append(mean)
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
        all_done.wait(
            PATIENCE
        )  # a process that leaves at once would break what the other still receives
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        0
    )  # without the end that Python makes of it, which may wait for gloo's threads, and they for it


def main():
    context = mp.get_context("spawn")
    results, all_done = context.SimpleQueue(), context.Barrier(NUM_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            rank_main, args=(NUM_RANKS, f"{folder}/store", results, all_done), nprocs=NUM_RANKS
        )
    answers = dict(results.get() for _ in range(NUM_RANKS))
    for rank, answer in answers.items():
        if isinstance(answer, str):
            print(f"rank {rank}: {answer}")
            sys.exit(f"not yet: rank {rank} waited in a collective that the other never called")
    if answers != {0: [step + 0.5 for step in range(STEPS)], 1: []}:
        sys.exit(
            f"not yet: rank 0 alone logs the mean over both, 0.5, 1.5, 2.5; logged was {answers}"
        )
    print("passed: all call the collective, one prints")


if __name__ == "__main__":
    main()
