"""Exercise wait-or-transfer: one process is late, and the network gets the blame.

    python exercise.py          (or: stepladder learn check wait-or-transfer)

Rank 1 is busy for a second before it comes. The time in all_reduce on rank 0 is then a second, for
one number."""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 2
DELAY_S = 1.0
START = "fork" if sys.platform == "linux" else "spawn"


def seconds_in_transfer(tensor):
    """Add up `tensor` over all processes, and return the seconds of the transfer."""
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - start


# -- the check: leave it as it is ------------------------------------------------------------------


def rank_main(rank, num_ranks, store, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    dist.barrier()
    if rank == 1:
        time.sleep(DELAY_S)  # it may be reading its data
    number = torch.tensor([rank + 1.0])
    seconds = seconds_in_transfer(number)
    shares = []
    for _ in range(5):  # nobody is late, unless the machine is busy: nearly all of it is transfer
        dist.barrier()
        start = time.perf_counter()
        counted = seconds_in_transfer(torch.ones(4_000_000))
        shares.append(counted / (time.perf_counter() - start))
    results.put((rank, seconds, number.item(), max(shares)))
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
    for rank, seconds, total, *_ in answers:
        print(f"rank {rank}: {seconds:.4f} s, the sum is {total}")
        if total != 3:
            sys.exit(f"not yet: the sum is 3, rank {rank} has {total}")
    longest = max(seconds for _, seconds, *_ in answers)
    if longest > DELAY_S / 2:
        sys.exit(f"not yet: {longest:.1f} s in transfer, where one number was sent")
    share = max(share for *_, share in answers)
    if share < 1 / 4:
        sys.exit(f"not yet: {share:.0%} of an all_reduce's time is counted, where nobody is late")
    print("passed: the wait for the late process is not counted")


if __name__ == "__main__":
    main()
