"""Exercise batch-norm: two processes train another model than one, with the same global batch.

    python exercise.py          (or: stepladder learn check batch-norm)

Eight samples per step, on one process or four on each of two. The gradients are averaged by DDP.
Yet the models differ by more than rounding."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2
SAMPLES = 8
START = "fork" if sys.platform == "linux" else "spawn"


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


# -- the check: leave it as it is ------------------------------------------------------------------


def train(model, share):
    """Make three steps with this share of each batch, and return all weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[share]), x[share].sum(1, keepdim=True)).backward()
        optimizer.step()
    return [number for p in model.parameters() for number in p.flatten().tolist()]


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    weights = train(DistributedDataParallel(make_model()), slice(rank, None, num_ranks))
    results.put((rank, weights))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context(START).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (NUM_RANKS, f"{folder}/store", results)
        mp.start_processes(rank_main, args, nprocs=NUM_RANKS, start_method=START)
    weights_of_two = dict(results.get() for _ in range(NUM_RANKS))[0]
    weights = train(make_model(), slice(None))
    difference = max(abs(a - b) for a, b in zip(weights, weights_of_two, strict=True))
    print(f"largest difference between weights: {difference:.2g}")
    layers = [type(layer).__name__ for layer in make_model()]
    if not any("Norm" in name for name in layers):
        sys.exit(f"not yet: the model should keep a normalisation, it has {layers}")
    if difference > 1e-5:
        sys.exit(f"not yet: two processes trained another model than one, by {difference:.2g}")
    print("passed: the same model on one process and on two, but for rounding")


if __name__ == "__main__":
    main()
