"""Exercise own-index: each process gives the films its own numbers.

    python exercise.py          (or: stepladder learn check own-index)

Two processes have the ratings of different users, and so other films. The embedding has a row per
film, and DDP averages the rows. Row 1 should be one film."""

import os
import sys
import tempfile

import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 2
FILMS = [[50, 10, 20, 10], [30, 50, 10, 40]]  # in the ratings of each process
START = "fork" if sys.platform == "linux" else "spawn"


def film_rows(films):
    """Return {film: row of the embedding}. films are those in this process's ratings."""
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, films)
    all_films = {film for share in shares for film in share}
    return {film: row for row, film in enumerate(sorted(all_films))}


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    results.put((rank, film_rows(FILMS[rank])))
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may wait for gloo's threads, and they for it


def main():
    results = mp.get_context(START).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (NUM_RANKS, f"{folder}/store", results)
        mp.start_processes(rank_main, args, nprocs=NUM_RANKS, start_method=START)
    rows = dict(results.get() for _ in range(NUM_RANKS))
    for rank in sorted(rows):
        print(f"rank {rank}: {rows[rank]}")
    for film, row in rows[0].items():
        for film_of_1, row_of_1 in rows[1].items():
            if row == row_of_1 and film != film_of_1:
                problem = f"row {row} is film {film} on rank 0, and it is another film on rank 1"
                sys.exit(f"not yet: {problem}: {film_of_1}")
    has_all_films = sorted(rows[0]) == [10, 20, 30, 40, 50]
    has_all_rows = sorted(rows[0].values()) == list(range(5))
    if rows[0] != rows[1] or not has_all_films or not has_all_rows:
        sys.exit("not yet: each of the five films needs a row, from 0 on, on every process")
    print("passed: a row is the same film on every process")


if __name__ == "__main__":
    main()
