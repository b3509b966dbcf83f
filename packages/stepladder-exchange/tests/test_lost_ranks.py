"""A rank's end is noticed, calls that differ are named, and no core is used while a rank waits."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from exchange_ranks import wait_until
from stepladder_exchange.shared_memory import SharedMemory
from stepladder_exchange.shared_segment import MAX_SLOTS, make_segment
from stepladder_exchange.wait import SLOT_WORDS
from stepladder_exchange.work import Work


@contextmanager
def memories(pids: list[int], timeout_seconds: float = 60.0) -> Iterator[list[SharedMemory]]:
    """Of each rank, all in this process; the ends of these processes are watched for."""
    segment = make_segment(len(pids))
    assert segment is not None
    mapping = mmap.mmap(segment, 0)
    os.close(segment)
    ranks = range(len(pids))
    group = [SharedMemory(mapping, rank, pids, timeout_seconds) for rank in ranks]
    yield group
    for memory in group:
        memory.leave_group()


@contextmanager
def another_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_others(memory: SharedMemory) -> Future[None]:
    """In a thread that sleeps already."""
    pool = ThreadPoolExecutor(1)
    native = pool.submit(threading.get_native_id).result()
    waiting = pool.submit(memory.all_reduce(torch.zeros(3)).wait)
    switches = Path(f"/proc/self/task/{native}/wchan")
    wait_until(lambda: "futex" in switches.read_text() or waiting.done())
    pool.shutdown(wait=False)
    return waiting


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_who_waits_for_a_process_that_ends_is_told_at_once(how: signal.Signals) -> None:
    with another_process() as process, memories([os.getpid(), process.pid]) as (memory, _):
        waiting = wait_for_others(memory)
        process.send_signal(how)
        with pytest.raises(RuntimeError, match="rank 1 has gone"):
            waiting.result(60)


def test_who_waits_for_a_rank_that_leaves_the_group_is_told() -> None:
    with memories([os.getpid()] * 3) as (first, second, _):
        waiting = wait_for_others(first)
        second.leave_group()
        with pytest.raises(RuntimeError, match="rank 1 has gone"):
            waiting.result(60)


def test_what_a_rank_brought_before_it_ended_is_taken() -> None:
    with another_process() as process, memories([os.getpid(), process.pid]) as (first, second):
        begun = first.all_reduce(torch.ones(3))
        brought = second.all_reduce(torch.ones(3))
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(brought.wait)
            wait_until(lambda: second.slots[0] or second.slots[SLOT_WORDS])
            process.kill()
            process.wait()
            wait_until(lambda: first.waiter.process_watch.ended == {1})
            begun.wait()
            later.result()


def test_a_rank_that_does_not_come_in_time_is_named_and_nobody_computes_meanwhile() -> None:
    before = time.thread_time()
    with (
        memories([os.getpid()] * 2, timeout_seconds=0.5) as (first, _),
        pytest.raises(RuntimeError, match=r"timed out: rank 1 did not arrive in 0\.5 s"),
    ):
        first.all_reduce(torch.zeros(3)).wait()
    assert time.thread_time() - before < 0.1


def brought(rank: SharedMemory, peer: str) -> Work:
    """What does not fit to an all-reduce of four floats."""
    if peer == "kind":
        return rank.broadcast(torch.zeros(4), 0)
    size = 5 if peer == "length" else 4
    dtype = torch.int32 if peer == "dtype" else torch.float32
    return rank.all_reduce(torch.zeros(size, dtype=dtype))


CALLS = {
    "length": "all_reduce sum (5 float32)",
    "dtype": "all_reduce sum (4 int32)",
    "kind": "broadcast from rank 0 (4 float32)",
    "more": "all_reduce sum (4 float32), all_reduce sum (1 float32)",
    "block": "all_gather (2 float32)",
}


@pytest.mark.parametrize("peer", CALLS)
def test_what_does_not_fit_between_ranks_fails_on_both_which_name_both_calls(peer: str) -> None:
    with memories([os.getpid()] * 2) as (first, second):
        if peer == "block":  # of one shape: its rows would become the other block's weights
            gathered = [torch.zeros(2), torch.zeros(2)]
            works = [
                first.all_gather(gathered, gathered[0], "a"),
                second.all_gather(gathered, gathered[1], "b"),
            ]
        else:
            works = [first.all_reduce(torch.zeros(4)), brought(second, peer)]
        if peer == "more":
            second.all_reduce(torch.zeros(1))
        with ThreadPoolExecutor(2) as pool:
            failed = [pool.submit(work.wait) for work in works]
            messages = [str(work.exception(60)) for work in failed]
    calls = [CALLS["block"] if peer == "block" else "all_reduce sum (4 float32)", CALLS[peer]]
    is_one_call = len({re.sub(r"\(\d+ ", "", call) for call in calls}) == 1
    differs = "passes another size" if is_one_call else "calls a different collective"
    for own in range(2):
        assert messages[own] == (
            f"rank {1 - own} {differs} here than rank {own}: {calls[1 - own]},"
            f" where rank {own} calls {calls[own]}"
        )


def test_ranks_that_do_not_fit_end_all_that_wait_for_a_rank_that_never_comes() -> None:
    with memories([os.getpid()] * 4) as (_, *ranks):
        works = [
            rank.all_reduce(torch.zeros(length))
            for rank, length in zip(ranks, (4, 5, 4), strict=True)
        ]
        with ThreadPoolExecutor(3) as pool:
            failed = [pool.submit(work.wait) for work in works]
            messages = [str(work.exception(60)) for work in failed]
    for message, other in zip(messages, (2, "[13]", 2), strict=True):
        assert re.match(f"rank {other} passes another size here than rank", message)


def test_there_is_none_for_one_rank_or_more_than_read_each_other() -> None:
    assert make_segment(1) is None and make_segment(MAX_SLOTS + 1) is None
