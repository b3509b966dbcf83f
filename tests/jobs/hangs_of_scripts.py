"""A script that hangs as its argument says, each way after public reports; two of them are only
slow.

The second argument is a port of this machine: the slow ones wait for a byte from there.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.queues import Queue

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
KIND = sys.argv[1]
END, _OTHER_END = socket.socketpair()  # nobody writes
if len(sys.argv) > 2:
    END = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
TIMEOUT = timedelta(seconds=10)


def sum_metric(correct: torch.Tensor) -> None:
    dist.all_reduce(correct)


def skip_metric() -> None:
    """Only a rank with a correct answer adds it up."""
    has_correct_answer = RANK == 0
    if has_correct_answer:
        sum_metric(torch.ones(2))


def wait_as_first() -> None:
    if RANK == 0:
        dist.barrier()


def save_on_first() -> None:
    """Gathering the parts of a model is a collective, and is called on the first rank alone."""
    if RANK == 0:
        parts = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(parts, torch.ones(2))


def read_queue(items: Queue[int] | queue.Queue[int]) -> None:
    items.get()


def wait_for_dead_worker() -> None:
    """The worker dies before it puts anything into the queue."""
    context = get_context("fork")
    items: Queue[int] = context.Queue()
    worker = context.Process(target=os._exit, args=(9,))
    worker.start()
    worker.join()
    read_queue(items)


def read_nothing() -> None:
    raise ValueError("no rows")


def wait_for_dead_thread() -> None:
    """The thread fails before it puts anything into the queue."""
    threading.Thread(target=read_nothing).start()
    read_queue(queue.Queue())


def lock_in_other_order(
    first: threading.Lock, second: threading.Lock, is_held: threading.Event
) -> None:
    with second:
        is_held.set()
        first.acquire()


def lock_in_two_orders() -> None:
    locks = threading.Lock(), threading.Lock()
    is_held = threading.Event()
    with locks[0]:
        threading.Thread(target=lock_in_other_order, args=(*locks, is_held), daemon=True).start()
        is_held.wait()
        locks[1].acquire()


def wait_for_lock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def download() -> None:
    END.recv(1)


def evaluate() -> None:
    END.recv(1)


def use_wrong_group() -> None:
    """The group has both ranks, and one of them uses the default group."""
    own = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2), group=own if RANK else None)


def receive() -> None:
    dist.recv(torch.zeros(2), src=0)


def group_on_first() -> None:
    if RANK == 0:
        dist.new_group([0, 1])


def group_in_other_order() -> None:
    members = [[0, 1], [0]]
    for ranks in members if RANK == 0 else members[::-1]:
        dist.new_group(ranks)


# kind: the rank that does it alone, or None for all, and what it does
HANGS: dict[str, tuple[int | None, Callable[[], None]]] = {
    "metric": (None, skip_metric),
    "barrier": (None, wait_as_first),
    "save": (None, save_on_first),
    "worker": (1, wait_for_dead_worker),
    "thread": (1, wait_for_dead_thread),
    "threads": (None, wait_for_dead_thread),
    "lock": (1, wait_for_lock),
    "locks": (1, lock_in_two_orders),
    "download": (0, download),
    "timeout": (0, download),
    "evaluate": (0, evaluate),
    "group": (None, use_wrong_group),
    "recv": (1, receive),
    "new-group": (None, group_on_first),
    "group-order": (None, group_in_other_order),
}


def hang() -> None:
    """Hang in the middle of the training."""
    rank, function = HANGS.get(KIND, (-1, wait_as_first))
    if rank in (None, RANK):
        function()


def count_steps() -> int:
    if KIND == "early" and RANK == 1:  # its own loss is small enough
        return 4
    return 7 if KIND == "uneven" and RANK == 0 else 6


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    # The short time begins when both have come.
    group = dist.new_group(timeout=TIMEOUT) if KIND == "timeout" else None
    model = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(count_steps()):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        if step == 3:
            hang()
        loss.backward()
        optimizer.step()
    if KIND == "early":
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
