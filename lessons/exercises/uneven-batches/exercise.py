"""Exercise uneven-batches: one process has a batch more, and waits for ever.

    python exercise.py          (or: stepladder learn check uneven-batches)

Rank 0 has five batches and rank 1 four. In the fifth step DDP waits for gradients that nobody
sends. So that this ends, a process that is done leaves after a while: gloo then reports an error to
the one that waits."""

import os
import sys
import tempfile
from contextlib import suppress
from threading import BrokenBarrierError

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2
BATCHES = [5, 4]  # of each process
PATIENCE_S = 5.0
START = "fork" if sys.platform == "linux" else "spawn"


def train_epoch(model, optimizer, batches):
    """Train on all batches of this process, and return their number."""
    done = 0
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        done += 1
    return done


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results, all_done):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        done = train_epoch(model, optimizer, [torch.ones(2, 3) for _ in range(BATCHES[rank])])
        results.put((rank, done, model.module.weight.tolist()))
    except RuntimeError as error:  # the other process has left
        results.put((rank, str(error).splitlines()[0].split("] ")[-1], None))
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
    answers = sorted(results.get() for _ in range(NUM_RANKS))
    for rank, done, _ in answers:
        print(f"rank {rank}: {done}" + " batches" * isinstance(done, int))
        if isinstance(done, str):
            sys.exit(f"not yet: rank {rank} waited for batches that the other does not have")
    if [done for _, done, _ in answers] != BATCHES:
        sys.exit(f"not yet: each process should train on all its batches, {BATCHES}")
    if answers[0][2] != answers[1][2]:
        sys.exit("not yet: the processes ended with different weights")
    print("passed: all batches, no hang, equal weights")


if __name__ == "__main__":
    main()
