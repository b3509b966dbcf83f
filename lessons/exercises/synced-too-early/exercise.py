"""Exercise synced-too-early: accumulated gradients that are sent at the wrong pass.

    python exercise.py          (or: stepladder learn check synced-too-early)

Four small batches make one step. The first one is sent and the last one is not, so the processes
make steps of their own. Their losses fall, and nobody compares the weights."""

import os
import sys
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2
START = "fork" if sys.platform == "linux" else "spawn"


def accumulate(model, batches):
    """Add up the gradients of all batches of a step. model: wrapped in DistributedDataParallel."""
    for index, batch in enumerate(batches):
        is_sent = index % len(batches) == 0
        with nullcontext() if is_sent else model.no_sync():
            (model(batch).mean() / len(batches)).backward()


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    buckets = []

    def count_and_reduce(group, bucket):
        buckets.append(bucket)
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, count_and_reduce)
    gradients = []
    for num_batches in (4, 3):
        batches = [torch.full((2, 3), float(10 * rank + n)) for n in range(num_batches)]
        model.zero_grad()
        accumulate(model, batches)
        gradients.append(model.module.weight.grad[0, 0].item())
    results.put((rank, gradients, len(buckets)))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context(START).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (NUM_RANKS, f"{folder}/store", results)
        mp.start_processes(rank_main, args, nprocs=NUM_RANKS, start_method=START)
    answers = sorted(results.get() for _ in range(NUM_RANKS))
    for rank, gradients, count in answers:
        print(f"rank {rank}: gradients {gradients} after steps of 4 and 3 batches, {count} sent")
    if answers[0][1] != answers[1][1]:
        sys.exit("not yet: the processes make steps with different gradients")
    if answers[0][1] != [6.5, 6.0]:
        sys.exit("not yet: the mean over all batches of both processes gives 6.5 and 6.0")
    if answers[0][2] != 2:
        sys.exit(f"not yet: {answers[0][2]} sends for two steps")
    print("passed: equal gradients on both processes, sent once per step")


if __name__ == "__main__":
    main()
