"""Exercise padded-evaluation: the accuracy depends on the number of processes.

    python exercise.py          (or: stepladder learn check padded-evaluation)

Ten test samples, of which a model gets seven right. Three processes share them, each counts its
correct ones, the counts are added. Ten does not divide by three, and the answer is not 70 %."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DistributedSampler

NUM_RANKS = 3
CORRECT = torch.tensor([1, 1, 0, 1, 0, 1, 1, 0, 1, 1])  # 1: the model is right on this sample


def evaluate(rank, num_ranks):
    """Return the correct answers and the samples, added over all processes."""
    share = CORRECT[list(DistributedSampler(CORRECT, num_ranks, rank, shuffle=False))]
    counts = torch.tensor([share.sum().item(), len(share)])
    dist.all_reduce(counts)
    return counts.tolist()


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    results.put((num_ranks, evaluate(rank, num_ranks)))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(NUM_RANKS, f"{folder}/store", results), nprocs=NUM_RANKS)
    answers = [results.get()[1] for _ in range(NUM_RANKS)]
    for rank, (correct, count) in enumerate(answers):
        print(f"answer {rank + 1}: {correct} of {count} correct, {100 * correct / count:.1f} %")
    if any(count != len(CORRECT) for _, count in answers):
        sys.exit(f"not yet: there are {len(CORRECT)} test samples, counted were {answers[0][1]}")
    if any(correct != CORRECT.sum() for correct, _ in answers):
        counted = [correct for correct, _ in answers]
        sys.exit(f"not yet: 7 of 10 are correct, counted were {counted}")
    print("passed: each test sample counts once")


if __name__ == "__main__":
    main()
