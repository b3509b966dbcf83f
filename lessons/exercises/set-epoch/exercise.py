"""Exercise set-epoch: the sampler shuffles, and yet every epoch has the same order.

    python exercise.py          (or: stepladder learn check set-epoch)

Two processes go through 12 samples for three epochs. Nothing fails, the loss falls; only the order
never changes."""

import os
import sys
import tempfile

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, DistributedSampler

NUM_SAMPLES = 12
NUM_RANKS = 2
EPOCHS = 3
START = "fork" if sys.platform == "linux" else "spawn"


def train():
    """Read the data EPOCHS times, and return the samples of each epoch in order."""
    data = list(range(NUM_SAMPLES))
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    epochs = []
    for _epoch in range(EPOCHS):
        samples = []
        for batch in loader:
            samples += batch.tolist()  # a training step would be here
        epochs.append(samples)
    return epochs


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    results.put((rank, [train(), train()]))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context(START).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (NUM_RANKS, f"{folder}/store", results)
        mp.start_processes(rank_main, args, nprocs=NUM_RANKS, start_method=START)
    answers = dict(results.get() for _ in range(NUM_RANKS))
    by_rank = [answers[rank][0] for rank in range(NUM_RANKS)]
    for epoch in range(EPOCHS):
        samples = [f"rank {rank} {by_rank[rank][epoch]}" for rank in range(NUM_RANKS)]
        print(f"epoch {epoch}: {'   '.join(samples)}")
    for epoch in range(EPOCHS):
        if sorted(n for epochs in by_rank for n in epochs[epoch]) != list(range(NUM_SAMPLES)):
            sys.exit(f"not yet: epoch {epoch} did not use every sample once")
    for epoch in range(1, EPOCHS):
        if by_rank[0][epoch] == by_rank[0][epoch - 1]:
            sys.exit(f"not yet: epoch {epoch} has the same order as epoch {epoch - 1}")
    if any(first != second for first, second in answers.values()):
        sys.exit("not yet: a second run has another order, so that no run can be repeated")
    print("passed: each epoch has its own order, and uses every sample once")


if __name__ == "__main__":
    main()
