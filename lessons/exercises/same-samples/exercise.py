"""Exercise same-samples: each process reads the whole data set.

    python exercise.py          (or: stepladder learn check same-samples)

DistributedDataParallel averages gradients. It deals out no samples. Without a sampler, all
processes draw from all samples, and an epoch is N epochs."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset

NUM_RANKS = 2
START = "fork" if sys.platform == "linux" else "spawn"


def make_loader(data, epoch):
    """Return the batches of 4 of one epoch, for this process. Each epoch has another order."""
    generator = torch.Generator().manual_seed(epoch)
    return DataLoader(data, batch_size=4, shuffle=True, generator=generator)


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    data = TensorDataset(torch.arange(40))
    epochs = [[batch.tolist() for (batch,) in make_loader(data, epoch)] for epoch in range(2)]
    results.put((rank, epochs))
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
    for epoch in range(2):
        shares = [[number for batch in epochs[epoch] for number in batch] for _, epochs in answers]
        print(f"epoch {epoch}: " + ", ".join(f"{len(share)} samples" for share in shares))
        seen = sorted(number for share in shares for number in share)
        if len(seen) > 40:
            sys.exit(f"not yet: {len(seen)} samples were read in an epoch of 40")
        if seen != list(range(40)):
            sys.exit("not yet: not every sample was read once")
        if len(shares[0]) != len(shares[1]):
            sys.exit("not yet: one process has more samples, and the other would wait")
    if any(epochs[0] == epochs[1] for _, epochs in answers):
        sys.exit("not yet: both epochs have the same order")
    if any(len(batch) != 4 for _, epochs in answers for epoch in epochs for batch in epoch):
        sys.exit("not yet: a batch has other than 4 samples")
    print("passed: each sample was read once per epoch, in another order")


if __name__ == "__main__":
    main()
