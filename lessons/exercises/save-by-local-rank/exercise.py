"""Exercise save-by-local-rank: on one node all is well, on two both write the snapshot.

    python exercise.py          (or: stepladder learn check save-by-local-rank)

Two nodes with two processes each, and a file system that both see. Exactly one process should write the
snapshot. The four processes are played one after the other here, and each writes into a folder of its own
instead of the same file, so that you can see who wrote.
"""

import sys
import tempfile
from pathlib import Path

import torch

# (rank, local rank): rank counts over all nodes, local rank on each node
RANKS = [(0, 0), (1, 1), (2, 0), (3, 1)]


def save(state, path, rank, local_rank):
    """Write the snapshot, on one process of all."""
    if local_rank == 0:
        torch.save(state, path)


# -- the check: leave it as it is -------------------------------------------------------------------------


def main():
    state = {"weights": torch.arange(3.0)}
    writers = []
    with tempfile.TemporaryDirectory() as folder:
        for rank, local_rank in RANKS:
            path = Path(folder) / f"rank-{rank}.pt"
            save(state, path, rank, local_rank)
            if path.exists():
                assert torch.equal(torch.load(path)["weights"], state["weights"])
                writers.append(rank)
    print(f"ranks that wrote: {writers}")
    if len(writers) != 1:
        sys.exit(f"not yet: {len(writers)} processes wrote the snapshot, ranks {writers}")
    print("passed: one process of all writes")


if __name__ == "__main__":
    main()
