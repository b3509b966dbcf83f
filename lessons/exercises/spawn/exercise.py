"""Exercise spawn: from one process to two, with mp.spawn, a sampler and DDP.

    python exercise.py          (or: stepladder learn check spawn)

A line with known slopes and some noise is learned on one process. Let two processes share the work:
each trains on its half of the samples, and both hold the same weights at the end."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset

NUM_RANKS = 2
NUM_SAMPLES = 512
EPOCHS = 5
SLOPES = torch.tensor([[2.0], [-1.0], [0.5]])


def make_data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 3, generator=generator)
    noise = torch.randn(NUM_SAMPLES, 1, generator=generator)
    return TensorDataset(torch.arange(NUM_SAMPLES), inputs, inputs @ SLOPES + 0.05 * noise)


def leave_group():
    """End this process once all ranks have called this. Nothing after the call runs."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may abort while gloo's threads still run


def train(rank, num_ranks, store, results):
    """Train on this process's share, and report its samples and its final weights."""
    # Your turn: 1. join the process group (`store` is a file that all processes can open)
    #            2. a sampler, so that each process has its share    3. DDP around the model
    #            4. leave_group() at the end
    data = make_data()
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(EPOCHS):
        samples = []
        for numbers, x, y in loader:
            samples += numbers.tolist()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    results.put((rank, sorted(samples), [p.tolist() for p in model.parameters()]))


def start(store, results):
    """Start the training. store is the path of the file for init_process_group."""
    train(0, 1, store, results)  # your turn: NUM_RANKS processes instead of this call


# -- the check: leave it as it is ------------------------------------------------------------------


def main():
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        start(f"{folder}/store", results)
    reports = []
    while not results.empty():
        reports.append(results.get())
    for rank, samples, _ in sorted(reports):
        print(f"rank {rank} saw {len(samples)} samples in the last epoch")
    if sorted(rank for rank, _, _ in reports) != list(range(NUM_RANKS)):
        ranks = len({rank for rank, _, _ in reports})
        sys.exit(f"not yet: {ranks} of {NUM_RANKS} processes did the work")
    if sorted(n for _, samples, _ in reports for n in samples) != list(range(NUM_SAMPLES)):
        sys.exit("not yet: the processes did not share the samples, each one once")
    weights = [torch.tensor(weights[0]) for _, _, weights in sorted(reports)]
    if not torch.equal(weights[0], weights[1]):
        sys.exit(f"not yet: the processes ended with different weights: {weights}")
    if (weights[0] - SLOPES.T).abs().max() > 0.05:
        sys.exit(f"not yet: the slopes are {SLOPES.T.tolist()}, found was {weights[0].tolist()}")
    print("passed: two processes, each sample once, the same weights on both, and they are right")


if __name__ == "__main__":
    main()
