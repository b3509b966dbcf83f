"""Exercise clip-before-average: the gradients are clipped before they are averaged.

    python exercise.py          (or: stepladder learn check clip-before-average)

Two processes have gradients of very different length. They are to be averaged and limited to length
1. The step must be that of one process with all samples."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 2
MAX_NORM = 1.0
GRADIENTS = torch.tensor([[8.0, 0.0], [0.0, 0.5]])  # one per process
START = "fork" if sys.platform == "linux" else "spawn"


def step(weight):
    """Make one step of all processes together. weight.grad is of this process's samples."""
    torch.nn.utils.clip_grad_norm_([weight], MAX_NORM)
    dist.all_reduce(weight.grad)
    weight.grad /= dist.get_world_size()
    weight.data -= weight.grad


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = GRADIENTS[rank].clone()
    step(weight)
    results.put((rank, weight.tolist()))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context(START).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (NUM_RANKS, f"{folder}/store", results)
        mp.start_processes(rank_main, args, nprocs=NUM_RANKS, start_method=START)
    steps = dict(results.get() for _ in range(NUM_RANKS))
    mean = GRADIENTS.mean(0)
    expected = -mean * min(1.0, MAX_NORM / mean.norm().item())
    by_rank = [steps[rank] for rank in sorted(steps)]
    print(f"one process: {expected.tolist()}   two processes: {by_rank}")
    if not all(torch.allclose(torch.tensor(step), expected, atol=1e-4) for step in by_rank):
        sys.exit(f"not yet: one process makes the step {expected.tolist()}, two made {steps[0]}")
    print("passed: the step of one process with all samples")


if __name__ == "__main__":
    main()
