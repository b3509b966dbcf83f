"""Exercise learning-rate: three processes are faster, and learn less.

    python exercise.py          (or: stepladder learn check learning-rate)

Each process keeps its batch of 8, so three processes make batches of 24 together: a third of the
steps per epoch. With the learning rate of one process, the loss is far behind after the same
epochs."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_RANKS = 3
BATCH_PER_RANK = 8
EPOCHS = 2
LR = 0.01


def learning_rate(num_ranks):
    """Return the rate. LR is right for one process with a batch of BATCH_PER_RANK."""
    return LR


# -- the check: leave it as it is ------------------------------------------------------------------


def train(rank, num_ranks):
    """Train by SGD with averaged gradients, and return the mean loss on all data."""
    x = torch.randn(480, 4, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]])
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, num_ranks, rank)
    weight = torch.zeros(4, 1, requires_grad=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x_batch, y_batch in DataLoader(data, BATCH_PER_RANK, sampler=sampler):
            (grad,) = torch.autograd.grad(((x_batch @ weight - y_batch) ** 2).mean(), weight)
            if num_ranks > 1:
                dist.all_reduce(grad)
            weight.data -= learning_rate(num_ranks) * grad / num_ranks
    return ((x @ weight - y) ** 2).mean().item()


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    results.put(train(rank, num_ranks))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(NUM_RANKS, f"{folder}/store", results), nprocs=NUM_RANKS)
    single = train(0, 1)
    shared = results.get()
    ratio = shared / single
    print(f"loss after {EPOCHS} epochs: {single:.4f} on one process, {shared:.4f} on {NUM_RANKS}")
    if not ratio <= 1.5:  # so that it also meets a loss that is not a number
        sys.exit(
            f"not yet: after the same epochs the loss is {ratio:.1f} times that of one process"
        )
    if ratio < 1 / 1.5:
        sys.exit(f"not yet: the loss should be that of one process, it is {ratio:.1g} times that")
    print("passed: the curve of one process, in a third of the steps")


if __name__ == "__main__":
    main()
