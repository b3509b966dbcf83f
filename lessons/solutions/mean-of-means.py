"""Exercise mean-of-means: the mean loss over all processes is not the mean of their means.

    python exercise.py          (or: stepladder learn check mean-of-means)

Two processes evaluate shares of different sizes, 6 samples and 2. Each reports its mean loss, and
the reported result is the mean of the two. One process alone, on all 8 samples, says something
else."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LOSSES = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0])  # of all test samples
SHARES = [slice(0, 6), slice(6, 8)]


def mean_loss(losses):
    """Return the mean over the samples of all processes. losses are those of this process."""
    total = torch.tensor([losses.sum().item(), len(losses)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# -- the check: leave it as it is ------------------------------------------------------------------


OTHER_LOSSES = LOSSES.square() + torch.arange(8)


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    shares = [losses[SHARES[rank]] for losses in (LOSSES, OTHER_LOSSES)]
    results.put((rank, [mean_loss(share) for share in shares]))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(len(SHARES), f"{folder}/store", results), nprocs=len(SHARES))
    answers = dict(results.get() for _ in SHARES)
    for index, losses in enumerate((LOSSES, OTHER_LOSSES)):
        expected = losses.mean().item()
        means = [answers[rank][index] for rank in sorted(answers)]
        print(f"one process: {expected}   two processes: {means}")
        if any(abs(mean - expected) > 1e-6 for mean in means):
            sys.exit(f"not yet: the mean over all samples is {expected}, reported is {means[0]}")
    print("passed: the same mean on any number of processes")


if __name__ == "__main__":
    main()
