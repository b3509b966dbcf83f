"""Collectives through shared memory: what gloo gives, a rank's end noticed, no core used while one
waits.
"""

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
from typing import Any

import pytest
import torch

from processes import wait_until
from ranks import run_ranks
from stepladder.core.world import World
from stepladder.exchange.shared_memory import SharedMemory
from stepladder.exchange.wait import SLOT_WORDS
from stepladder.exchange.work import Work
from stepladder.rank.shared_segment import (
    EXCHANGE_VARIABLE,
    HALF_BYTES,
    MAX_SLOTS,
    MEMORY_EXCHANGE,
    make_segment,
)
from stepladder.train.comm import Comm
from stepladder.train.sync import make_sync
from stepladder.train.sync.ddp import allocate_shared_zeros

pytestmark = pytest.mark.ranks

LARGE = HALF_BYTES // 4 + 1000  # numbers that do not fit into a half
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8


def drawn(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * size + rank)
    return torch.randint(0, 60, (size,), generator=generator).to(dtype)


def scattered(comm: Comm, complete: torch.Tensor) -> torch.Tensor:
    """This rank's slice of the sum; gloo's by an all-reduce."""
    own_part = complete.chunk(comm.world.world_size)[comm.world.rank].clone()
    if comm.shared_memory is None:
        comm.all_reduce(complete).wait()
        return complete.chunk(comm.world.world_size)[comm.world.rank]
    comm.reduce_scatter(own_part, complete, "").wait()
    return own_part


def all_collectives(comm: Comm) -> list[Any]:
    """What every collective leaves, over types and sizes; several are under way at once."""
    assert (comm.shared_memory is not None) == (os.environ[EXCHANGE_VARIABLE] == MEMORY_EXCHANGE)
    size = comm.world.world_size
    rank = comm.world.rank
    results: list[Any] = []
    for length in (0, 1, 17, LARGE):
        sums = [drawn(rank, length, dtype) for dtype in DTYPES]
        pendings = [comm.all_reduce(tensor) for tensor in sums]
        for pending in reversed(pendings):
            pending.wait()
        message = drawn(rank, length, torch.float32)
        comm.broadcast(message, size - 1)
        gathered = torch.empty(size * length)
        comm.all_gather(gathered, drawn(rank, length, torch.float32)).wait()
        sent = drawn(rank, size * length, torch.float32)
        sizes = [length] * size
        received = torch.empty_like(sent)
        comm.all_to_all(received, sent, sizes, sizes).wait()
        results += [*sums, message, gathered, received, scattered(comm, sent)]
    turned = drawn(rank, 24, torch.float32).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    comm.all_reduce(turned).wait()
    assert len(turned.stride()) == 4 and not turned.is_contiguous()
    lasting = [
        allocate_shared_zeros(comm, LARGE + more, dtype)
        for more, dtype in ((0, torch.float32), (5, torch.int64))
    ]
    for step in range(2):  # they are reduced where they lie
        for tensor in lasting:
            tensor += drawn(rank, len(tensor) + step, tensor.dtype)[step:]
        for pending in [comm.all_reduce(tensor) for tensor in lasting]:
            pending.wait()
    results += lasting
    adding, sums = comm.start_sum([rank, 0.5, True])
    adding.wait()
    assert sums() == [sum(range(size)), size / 2, size]
    args = (
        comm.gather_bytes(bytes([rank]) * 100),
        comm.broadcast_bytes(b"word" if rank == 0 else None),
    )
    return [[item.clone() for item in results], turned.contiguous(), args, comm.exact_mean(rank, 2)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_collective_leaves_what_gloo_leaves(world_size: int) -> None:
    shared, by_gloo = (
        run_ranks(all_collectives, world_size, by_gloo=gloo) for gloo in (False, True)
    )
    for ours, theirs in zip(shared, by_gloo, strict=True):
        assert all(map(torch.equal, ours[0], theirs[0])) and len(ours[0]) == 38
        assert torch.equal(ours[1], theirs[1]) and ours[2:] == theirs[2:]


def trees(comm: Comm, lengths: list[int], passes: int) -> list[torch.Tensor]:
    """Sums of numbers that any other order of additions would round otherwise."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(length)) for length in lengths])
    sync = make_sync("exact", model, comm, 1)
    rank = comm.world.rank
    size = comm.world.world_size
    first, last = passes * rank // size, passes * (rank + 1) // size
    results = []
    for step in range(3):
        sync.begin(first, last - first, passes)
        for number in range(first, last):
            generator = torch.Generator().manual_seed(100 * step + number)
            loss = sum((p * torch.randn(len(p), generator=generator)).sum() for p in model)
            sync.backward(loss, 1, torch.tensor([float(number)]))
        result = sync.finish(last - first, [rank == 0])
        assert (result.total_count, result.votes, result.extra.tolist()) == (
            passes,
            [True],
            [sum(range(passes))],
        )
        results += [p.grad.clone() for p in model]
        for p in model:
            p.grad = None
    return results


@pytest.mark.parametrize("passes", [5, 8])
def test_the_tree_has_the_same_bits_on_any_number_of_ranks(passes: int) -> None:
    lengths = [7, LARGE, 1, 33]
    alone = trees(Comm(World(), torch.device("cpu")), lengths, passes)
    for world_size, by_gloo in ((2, False), (3, False), (4, False), (3, True)):
        for grads in run_ranks(trees, world_size, lengths, passes, by_gloo=by_gloo):
            assert all(map(torch.equal, grads, alone)), (world_size, by_gloo)


# -- a rank alone with others that do not come -----------------------------------------------------


@contextmanager
def memories(pids: list[int], timeout_seconds: float = 60.0) -> Iterator[list[SharedMemory]]:
    """Of each rank, all in this process; the ends of these processes are watched for."""
    segment = make_segment(len(pids))
    assert segment is not None
    mapping = mmap.mmap(segment.number, 0)
    segment.close()
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
    wait_until(lambda: "futex" in switches.read_text() or waiting.done(), str)
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
            wait_until(lambda: second.slots[0] or second.slots[SLOT_WORDS], str)
            process.kill()
            process.wait()
            wait_until(lambda: first.waiter.process_watch.ended == {1}, str)
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
