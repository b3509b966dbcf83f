"""Exercise torchrun: let the launcher say who you are.

    torchrun --standalone --nproc-per-node 2 exercise.py    (or: stepladder learn check torchrun)

torchrun starts two processes and puts into the environment of each who it is and where the others
are. This script does not look there: both processes believe that they are alone, and both do all
the work."""

import os
import sys

import torch
import torch.distributed as dist

NUM_SAMPLES = 10


def join():
    """Join the process group, and return this process's rank and the number of processes."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


# -- the check: leave it as it is ------------------------------------------------------------------


def work(rank, num_ranks):
    """Return the sum of this process's samples, and the sum of all."""
    total = torch.tensor([float(sum(range(rank, NUM_SAMPLES, num_ranks)))])
    share = total.item()
    dist.all_reduce(total)
    return share, total.item()


def fail(text):
    """Print the problem and exit; torchrun then ends the other processes."""
    sys.stderr.write(f"not yet: {text}\n")  # one write: another process may write too
    sys.exit(1)


def main():
    if "RANK" not in os.environ:
        sys.exit("not yet: started without torchrun, see the first lines of this file")
    expected = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    rank, num_ranks = join()
    if (rank, num_ranks) != expected:
        belief = f"rank {rank!r} of {num_ranks!r}"
        fail(f"rank {expected[0]} of {expected[1]} believes that it is {belief}")
    if not dist.is_initialized():
        fail("the processes have not met: no process group")
    share, total = work(rank, num_ranks)
    expected_total = float(sum(range(NUM_SAMPLES)))
    print(f"rank {rank} of {num_ranks}: {share} of {total}", flush=True)
    if total != expected_total:
        fail(f"the sum over all processes is {total}, and should be {expected_total}")
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    if rank == 0:
        print("passed: the processes know who they are and share the work")


if __name__ == "__main__":
    main()
