"""An ordinary script that knows nothing of stepladder, and hangs as the variable HANG says: "KIND
STEP".
"""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

KIND, STEP = ([*os.environ.get("HANG", "none 0").split(), "0"])[:2]
RANK = int(os.environ["RANK"])
HANGS = RANK == 1


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if KIND == "data" and HANGS and index == 8 * int(STEP):
            time.sleep(1000)
        return torch.randn(4)


def log_loss(loss: torch.Tensor) -> None:
    if RANK == 0:  # the classical mistake
        dist.all_reduce(loss)


def validate() -> None:
    time.sleep(1000)


def deadlock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def hang(loss: torch.Tensor) -> None:
    if KIND == "alone":
        log_loss(loss)
    elif KIND == "shapes":
        dist.all_reduce(torch.zeros(7 if HANGS else 6))
    elif KIND == "sleep" and HANGS:
        validate()
    elif KIND == "lock" and HANGS:
        deadlock()
    elif KIND == "stop" and HANGS:
        os.kill(os.getpid(), 19)  # SIGSTOP


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for step, batch in enumerate(
        DataLoader(Samples(), 8, num_workers=4 * (KIND == "data")), start=1
    ):
        loss = model(batch).sum()
        if step == int(STEP):
            hang(loss.detach().clone())
        loss.backward()


if __name__ == "__main__":
    main()
