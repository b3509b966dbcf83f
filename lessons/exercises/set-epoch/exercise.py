"""Exercise set-epoch: the sampler shuffles, and yet every epoch has the same order.

    python exercise.py          (or: stepladder learn check set-epoch)

Two ranks go through 12 samples for three epochs. Both samplers are made here, in one process: a sampler needs
no other process to know its share. Nothing fails, the loss falls; only the order never changes.
"""

import sys

from torch.utils.data import DataLoader, DistributedSampler

NUM_SAMPLES, NUM_RANKS, EPOCHS = 12, 2, 3


def train(rank):
    """Go through the data EPOCHS times. Returns the samples of each epoch, in order."""
    data = list(range(NUM_SAMPLES))
    sampler = DistributedSampler(data, NUM_RANKS, rank, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    epochs = []
    for _epoch in range(EPOCHS):
        seen = []
        for batch in loader:
            seen += batch.tolist()  # a training step would be here
        epochs.append(seen)
    return epochs


# -- the check: leave it as it is -------------------------------------------------------------------------


def main():
    by_rank = [train(rank) for rank in range(NUM_RANKS)]
    for epoch in range(EPOCHS):
        print(f"epoch {epoch}: " + "   ".join(f"rank {r} {by_rank[r][epoch]}" for r in range(NUM_RANKS)))
    for epoch in range(EPOCHS):
        if sorted(n for epochs in by_rank for n in epochs[epoch]) != list(range(NUM_SAMPLES)):
            sys.exit(f"not yet: epoch {epoch} did not use every sample once")
    for epoch in range(1, EPOCHS):
        if by_rank[0][epoch] == by_rank[0][epoch - 1]:
            sys.exit(f"not yet: epoch {epoch} has the same order as epoch {epoch - 1}")
    if by_rank != [train(rank) for rank in range(NUM_RANKS)]:
        sys.exit("not yet: a second run has another order, so that no run can be repeated")
    print("passed: each epoch has its own order, and uses every sample once")


if __name__ == "__main__":
    main()
