"""An ordinary script in which rank 1 keeps the others waiting, or leaves them: as its first
argument says.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

KIND, RANK = sys.argv[1], int(os.environ["RANK"])
STEPS, LAST, HELD = 20, 10, Path("held")
SAID = Path("said")  # the test makes it when the launcher has said what the test waits for
SAID_AGAIN = Path("said-again")


def compute_metric() -> None:
    while True:
        pass


def match_pattern() -> None:
    re.match(
        "(a+)+$", "a" * 60 + "b"
    )  # without end, in compiled code that holds the interpreter's lock


def write_file() -> None:
    with HELD.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def count_lines() -> None:
    subprocess.run(["sleep", "1000"], check=False)


def fail_late() -> None:
    come_back()
    raise ValueError("the metric has no meaning")


def come_back() -> None:
    # A handler of faulthandler's sets errno to 0 (CPython to 3.14), so a call that fails as it runs
    # is an OSError without a number. Seldom, but without a pause nearly all time is such calls.
    while not SAID.exists():
        time.sleep(0.01)


BUSY = {
    "busy": compute_metric,
    "gil": match_pattern,
    "file": write_file,
    "child": count_lines,
    "raise": fail_late,
}
BUSY["back"] = come_back


def train() -> None:
    if RANK == 1 and KIND == "early":
        compute_metric()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    uneven = RANK == 1 and KIND in ("return", "open")
    held = HELD.open("w") if RANK == 0 else None  # keeps the lock for rank 1 away
    if held is not None:
        fcntl.flock(held, fcntl.LOCK_EX)
    for step, batch in enumerate(DataLoader(torch.randn(LAST if uneven else STEPS, 4)), start=1):
        if RANK == 1 and step == LAST:
            BUSY.get(KIND, int)()
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if RANK == 1 and step == LAST:
            leave()
    has_more = torch.tensor(float(KIND == "back"))
    while has_more:  # until the launcher has seen them continue
        time.sleep(0.1)
        has_more.fill_(not SAID_AGAIN.exists())
        dist.all_reduce(has_more, dist.ReduceOp.MIN)


def leave() -> None:
    if KIND == "exit":
        sys.exit(0)
    if KIND == "os-exit":
        os._exit(0)
    if KIND == "swallowed":
        raise StopIteration
    if KIND == "open" and os.fork() == 0:  # keeps the connections, as NCCL's are: nobody is told
        signal.pause()


try:
    train()
except StopIteration:
    print("no more data")
if KIND == "open":
    os._exit(0)
