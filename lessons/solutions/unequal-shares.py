"""Exercise unequal-shares: all_gather needs tensors of one size, and the shares have others.

    python exercise.py          (or: stepladder learn check unequal-shares)

Sample i of the test set is with process i % N. Each process has predicted its own samples, and
pads its predictions before all_gather. The list of all predictions is to be scored."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F


def gather(predictions):
    """Return the predictions for all samples in their order, from those of this process."""
    longest = torch.tensor(len(predictions))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    padded = F.pad(predictions, (0, longest.item() - len(predictions)))
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    count = torch.tensor(len(predictions))
    dist.all_reduce(count)
    # Row by row: a sample of each process in turn, as they were dealt. The padding comes last.
    return torch.stack(parts, dim=1).flatten()[: count.item()]


# -- the check: leave it as it is ------------------------------------------------------------------


NUM_RANKS = 3
PREDICTIONS = [7.0, 0.0, 5.0, 4.0, 3.0, 0.0, 1.0]


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    lists = PREDICTIONS, PREDICTIONS[:6]
    results.put((rank, [gather(torch.tensor(one[rank::num_ranks])).tolist() for one in lists]))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(NUM_RANKS, f"{folder}/store", results), nprocs=NUM_RANKS)
    answers = dict(results.get() for _ in range(NUM_RANKS))
    for rank in range(NUM_RANKS):
        for answer, expected in zip(answers[rank], (PREDICTIONS, PREDICTIONS[:6]), strict=True):
            print(f"rank {rank}: {answer}   expected: {expected}")
            if len(answer) != len(expected):
                sys.exit(f"not yet: {len(answer)} predictions for {len(expected)} samples")
            if answer != expected:
                sys.exit("not yet: a prediction is with the sample of another one")
    print("passed: one prediction for each sample, in their order")


if __name__ == "__main__":
    main()
