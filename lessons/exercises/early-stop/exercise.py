"""Exercise early-stop: one process stops early, and the other waits for it.

    python exercise.py          (or: stepladder learn check early-stop)

Training should end when the loss is low enough. Each process looks at the loss of its own samples.
So that this ends, a process that is done leaves after a while: gloo then reports an error to the
one that waits."""

import os
import sys
import tempfile
from contextlib import suppress
from threading import BrokenBarrierError

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 2
GOOD_ENOUGH = 0.3
PATIENCE_S = 5.0
# Of each process's samples, after each epoch.
LOSSES = [[0.9, 0.5, 0.2, 0.1, 0.1], [0.9, 0.7, 0.5, 0.3, 0.2]]
START = "fork" if sys.platform == "linux" else "spawn"


def should_stop(loss):
    """Return whether the training ends now. loss is of this process's samples."""
    return loss < GOOD_ENOUGH


# -- the check: leave it as it is ------------------------------------------------------------------


def train(rank):
    """Train, and return the number of epochs."""
    for epoch, loss in enumerate(LOSSES[rank]):
        dist.all_reduce(torch.ones(1))  # the gradients of a training step
        if should_stop(loss):
            return epoch + 1
    return len(LOSSES[rank])


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
    all_done = mp.get_context(START).Barrier(NUM_RANKS)
    results = mp.get_context(START).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (NUM_RANKS, f"{folder}/store", results, all_done)
        mp.start_processes(rank_main, args, nprocs=NUM_RANKS, start_method=START)
    answers = dict(results.get() for _ in range(NUM_RANKS))
    for rank, answer in sorted(answers.items()):
        print(f"rank {rank}: {answer}" + " epochs" * isinstance(answer, int))
        if isinstance(answer, str):
            sys.exit(f"not yet: rank {rank} waited for a process that had stopped")
    if answers != {0: 4, 1: 4}:
        sys.exit(f"not yet: the mean loss is good enough after 4 epochs, not {answers}")
    print("passed: all stop after the same epoch")


if __name__ == "__main__":
    main()
