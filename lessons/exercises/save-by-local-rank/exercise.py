"""Exercise save-by-local-rank: on one node all is well, on two both write the snapshot.

    python exercise.py          (or: stepladder learn check save-by-local-rank)

Two nodes have two processes each, and a file system that both see. Exactly one process should write
the snapshot. The four processes take turns here, so that you can see who writes over whose
snapshot."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 4
PER_NODE = 2
START = "fork" if sys.platform == "linux" else "spawn"


def save(state, path, rank, local_rank):
    """Write the snapshot on one process. local_rank counts within a node, rank over all nodes."""
    if local_rank == 0:
        torch.save(state, path)


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    path = Path(store).with_name("snapshot.pt")
    for turn in range(num_ranks):
        if turn == rank:
            save({"weights": torch.arange(3.0), "written by": rank}, path, rank, rank % PER_NODE)
            results.put((rank, torch.load(path)["written by"]))
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context(START).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"written by": None}, Path(folder, "snapshot.pt"))  # that of an earlier epoch
        args = (NUM_RANKS, f"{folder}/store", results)
        mp.start_processes(rank_main, args, nprocs=NUM_RANKS, start_method=START)
    turns = sorted(results.get() for _ in range(NUM_RANKS))
    for rank, writer in turns:
        turn = f"after the turn of rank {rank}, on node {rank // PER_NODE}"
        print(f"{turn}, the snapshot is that of rank {writer}")
    writers = sorted({writer for _, writer in turns if writer is not None})
    if len(writers) != 1:
        sys.exit(f"not yet: {len(writers)} processes wrote the snapshot, ranks {writers}")
    print("passed: one process of all writes")


if __name__ == "__main__":
    main()
