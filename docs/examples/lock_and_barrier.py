"""A script that hangs: rank 0 keeps a file lock while it waits for rank 1, which waits for the lock."""

import fcntl
import time
from pathlib import Path

import torch.distributed as dist


def prepare_data() -> None:
    with Path("data.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        dist.barrier()


dist.init_process_group("gloo")
time.sleep(dist.get_rank())  # rank 0 comes first
prepare_data()
