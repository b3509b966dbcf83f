"""Exercise metric-added-twice: sums that are added over the processes again after each batch.

    python exercise.py          (or: stepladder learn check metric-added-twice)

Each process counts the right answers and the samples of its share. The counts are added over the
processes after each batch, and so the next batch adds sums of sums."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 2
START = "fork" if sys.platform == "linux" else "spawn"


def evaluate(batches):
    """Return the number of right answers and of samples, over all batches of all processes.

    A batch is a tensor of booleans: which answers are right."""
    counts = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        counts += torch.tensor([batch.sum().item(), len(batch)], dtype=torch.float64)
    dist.all_reduce(counts)
    return counts.tolist()


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    answers = torch.arange(40) % 4 != 0  # three quarters are right
    one_batch = evaluate([answers[rank::num_ranks]])
    share = answers[: 30 + rank].chunk(num_ranks)[rank]
    several = evaluate(list(share.split(5)))
    results.put((rank, one_batch, several))
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
    for rank, one_batch, several in answers:
        print(f"rank {rank}: {one_batch} of one batch, {several} of several")
    if any(several[1] > 40 for *_, several in answers):
        sys.exit(f"not yet: {answers[0][2][1]:.0f} samples were counted, of 40 at most")
    if any(one_batch != [30, 40] for _, one_batch, _ in answers):
        sys.exit(f"not yet: 30 of 40 answers are right, and this says {answers[0][1]}")
    if any(several != [22, 30] for *_, several in answers):
        sys.exit(f"not yet: 22 of 30 answers are right, and this says {answers[0][2]}")
    print("passed: each answer counts once, on all processes")


if __name__ == "__main__":
    main()
