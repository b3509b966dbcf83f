"""Exercise module-prefix: the saved weights are there, and nobody finds them.

    python exercise.py          (or: stepladder learn check module-prefix)

Two processes train a model in DDP, and rank 0 saves it. A script without DDP loads the file, and
predicts as if nobody had trained."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2
START = "fork" if sys.platform == "linux" else "spawn"


def save(model, path):
    """Save the weights for scripts without DDP. model: wrapped in DistributedDataParallel."""
    torch.save(model.module.state_dict(), path)


# -- the check: leave it as it is ------------------------------------------------------------------


def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.full((4, 3), rank + 1.0)).mean().backward()
    optimizer.step()
    if rank == 0:
        save(model, Path(store).with_name("weights.pt"))
    results.put((rank, model.module.weight.tolist()))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context(START).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (NUM_RANKS, f"{folder}/store", results)
        mp.start_processes(rank_main, args, nprocs=NUM_RANKS, start_method=START)
        file = torch.load(f"{folder}/weights.pt")
    trained = dict(results.get() for _ in range(NUM_RANKS))[0]
    model = make_model()
    missing = model.load_state_dict(file, strict=False).missing_keys
    print(f"keys in the file: {list(file)}\ntrained {trained}\nloaded  {model.weight.tolist()}")
    if missing:
        loaded = 2 - len(missing)
        sys.exit(
            f"not yet: {loaded} of 2 tensors were found, and the others are those of a new model"
        )
    if model.weight.tolist() != trained:
        sys.exit("not yet: the loaded weights are not the trained ones")
    print("passed: a script without DDP has the trained weights")


if __name__ == "__main__":
    main()
