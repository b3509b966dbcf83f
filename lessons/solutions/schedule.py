"""Exercise schedule: with two processes the learning rate falls twice as fast.

    python exercise.py          (or: stepladder learn check schedule)

The rate falls from 0.8 to 0.1 over eight steps. On two processes it is there after four.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 2
STEPS = 8
FIRST_RATE = 0.8
START = "fork" if sys.platform == "linux" else "spawn"


def after_step(scheduler, rank, num_ranks):
    """Change the rate. Each process calls this after each step of its optimizer."""
    scheduler.step()


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=FIRST_RATE)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1 / STEPS, total_iters=STEPS - 1)
    rates = []
    for _ in range(STEPS):
        rates.append(round(scheduler.get_last_lr()[0], 3))
        weight.grad = torch.tensor([0.5 + rank])
        dist.all_reduce(weight.grad)
        optimizer.step()
        after_step(scheduler, rank, num_ranks)
    results.put((rank, rates, weight.item()))
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
    plan = [round(FIRST_RATE * (STEPS - step) / STEPS, 3) for step in range(STEPS)]
    print(f"plan:   {plan}")
    for rank, rates, weight in answers:
        print(f"rank {rank}: {rates}, weight {weight:.3f}")
    if answers[0][2] != answers[1][2]:
        sys.exit(
            "not yet: the processes hold different weights, because their rates were different"
        )
    for step, (rate, planned) in enumerate(zip(answers[0][1], plan, strict=True)):
        if rate != planned:
            sys.exit(f"not yet: the learning rate of step {step} is {rate}, planned is {planned}")
    print("passed: the planned rate in each step, on every process")


if __name__ == "__main__":
    main()
