"""Exercise share-the-work: three processes, and each does all the work.

    python exercise.py          (or: stepladder learn check share-the-work)

Ten samples are to be looked at, by three processes together.
"""

import sys

import torch.multiprocessing as mp

NUM_RANKS = 3
SAMPLES = list(range(10))
START = "fork" if sys.platform == "linux" else "spawn"


def my_samples(rank, num_ranks):
    """Return the samples that this process reads."""
    return SAMPLES


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, results):
    results.put((rank, list(my_samples(rank, num_ranks))))


def main():
    results = mp.get_context(START).SimpleQueue()
    mp.start_processes(rank_main, (NUM_RANKS, results), nprocs=NUM_RANKS, start_method=START)
    shares = dict(results.get() for _ in range(NUM_RANKS))
    for rank in sorted(shares):
        print(f"rank {rank}: {shares[rank]}")
    samples = sorted(sample for share in shares.values() for sample in share)
    if samples != SAMPLES:
        counts = f"looked at {len(samples)} samples, there are {len(SAMPLES)}"
        sys.exit(f"not yet: {NUM_RANKS} processes {counts}")
    if max(map(len, shares.values())) > 4:
        sys.exit("not yet: one process has much more to do than the others")
    print("passed: each sample belongs to one process")


if __name__ == "__main__":
    main()
