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

NUM_RANKS, LONGEST = 2, 1.0
GRADIENTS = torch.tensor([[8.0, 0.0], [0.0, 0.5]])  # one per process
START = "fork" if sys.platform == "linux" else "spawn"


def step(weight):
    """One step of all processes together. weight.grad: the gradient of this process's samples."""
    torch.nn.utils.clip_grad_norm_([weight], LONGEST)
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
    os._exit(
        0
    )  # without the end that Python makes of it, which may wait for gloo's threads, and they for it


def main():
    results = mp.get_context(START).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (NUM_RANKS, f"{folder}/store", results)
        mp.start_processes(rank_main, args, nprocs=NUM_RANKS, start_method=START)
    steps = dict(results.get() for _ in range(NUM_RANKS))
    mean = GRADIENTS.mean(0)
    right = -mean * min(1.0, LONGEST / mean.norm().item())
    print(
        f"one process: {right.tolist()}   two processes: {[steps[rank] for rank in sorted(steps)]}"
    )
    if not all(torch.allclose(torch.tensor(found), right, atol=1e-4) for found in steps.values()):
        sys.exit(f"not yet: one process makes the step {right.tolist()}, two made {steps[0]}")
    print("passed: the step of one process with all samples")


if __name__ == "__main__":
    main()
