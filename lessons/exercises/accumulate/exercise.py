"""Exercise accumulate: gradient accumulation that sends everything four times.

    python exercise.py          (or: stepladder learn check accumulate)

Four small batches make one step. Their gradients are added up on each process; only the sum has to
be averaged. Instead DDP averages after each batch."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2
START = "fork" if sys.platform == "linux" else "spawn"


def accumulate(model, batches):
    """Add up the gradients of all batches of a step. model: wrapped in DistributedDataParallel."""
    for batch in batches:
        model(batch).mean().backward()


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
    batches = [torch.full((2, 3), float(10 * rank + number)) for number in range(4)]
    accumulate(model, batches)
    results.put((rank, len(buckets), model.module.weight.grad[0].tolist()))
    torch.optim.SGD(model.parameters(), lr=0.01).step()  # of all four batches
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
    for rank, count, gradient in answers:
        print(f"rank {rank}: {count} all_reduces, gradient {gradient}")
    if any(gradient != [26.0] * 3 for *_, gradient in answers):
        sys.exit("not yet: the gradient of all eight batches is 26, on both processes")
    if any(count != 1 for _, count, _ in answers):
        sys.exit(f"not yet: {answers[0][1]} all_reduces for one step")
    print("passed: the right gradient, sent once")


if __name__ == "__main__":
    main()
