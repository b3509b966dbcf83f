"""Exercise clip-a-slice: each process clips its slice of the gradients by the norm of that slice.

    python exercise.py          (or: stepladder learn check clip-a-slice)

Two processes have half of the averaged gradients each, as an optimizer in slices needs them. They
are clipped to a norm of 1. One process alone, with all of them, takes another step."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MAX_NORM = 1.0


def clip(gradients):
    """Scale this process's slice, so that all slices together have a norm of MAX_NORM or less."""
    norm = gradients.norm().item()
    gradients *= min(1.0, MAX_NORM / norm)


# -- the check: leave it as it is ------------------------------------------------------------------


NUM_RANKS = 2
CASES = [  # of both slices
    [3.0, 0.0, 0.0, 4.0, 0.0, 12.0],
    [0.8, 0.0, 0.0, 0.0, 0.0, 0.8],
    [0.1, 0.2, 0.3, 0.4, 0.3, 0.2],
]


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    slices = [torch.tensor(case).chunk(num_ranks)[rank].clone() for case in CASES]
    for gradients in slices:
        clip(gradients)
    results.put((rank, [gradients.tolist() for gradients in slices]))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(NUM_RANKS, f"{folder}/store", results), nprocs=NUM_RANKS)
    answers = dict(results.get() for _ in range(NUM_RANKS))
    for number, case in enumerate(CASES):
        parameter = torch.nn.Parameter(torch.zeros(len(case)))
        parameter.grad = torch.tensor(case)
        torch.nn.utils.clip_grad_norm_(parameter, MAX_NORM)
        clipped = [value for rank in range(NUM_RANKS) for value in answers[rank][number]]
        print(f"{case}: one process {[round(value, 3) for value in parameter.grad.tolist()]}")
        print(f"    two processes {[round(value, 3) for value in clipped]}")
        if not torch.allclose(torch.tensor(clipped), parameter.grad, atol=1e-4):
            sys.exit(f"not yet: of {case} two processes take another step than one")
    print("passed: the same step as on one process")


if __name__ == "__main__":
    main()
