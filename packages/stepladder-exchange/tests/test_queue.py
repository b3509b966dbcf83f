"""The order and the threads of collectives of a group, and how long a rank waits for those of gloo."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stepladder_exchange
from exchange_ranks import TIMEOUT_S, run_ranks, wait_until
from stepladder_exchange.group_work import CollectiveQueue, GroupWork
from stepladder_exchange.network import wait_for_collective
from stepladder_exchange.shared_memory import SharedMemory
from stepladder_exchange.shared_segment import make_segment
from stepladder_exchange.wait import SLEEPING_WORD

assert stepladder_exchange  # registers the back end


def chained() -> float:
    """A callback starts a collective and waits for it, as those of PowerSGD do; the peer is late."""
    group = dist.new_group(backend="stepladder")
    store = dist.distributed_c10d._get_default_store()
    ones = [torch.ones(2) for _ in range(3)]

    def wait_for_next(_: torch.futures.Future[Any]) -> None:
        work = dist.all_reduce(ones[1], group=group, async_op=True)
        store.set("second", "")
        work.get_future().wait()

    if dist.get_rank() == 0:
        first = dist.all_reduce(ones[0], group=group, async_op=True)
        end = first.get_future().then(wait_for_next)
        store.set("first", "")
        end.wait()
    else:
        for number, name in enumerate(("first", "second")):
            store.wait([name])
            dist.all_reduce(ones[number], group=group)
    dist.all_reduce(ones[2], group=group)
    return torch.stack(ones).sum().item()


def test_a_callback_may_wait_for_a_collective_that_it_starts() -> None:
    assert run_ranks(chained, 2) == [12.0] * 2


def memory_of_two() -> SharedMemory:
    """The first rank's. The second one never comes."""
    segment = make_segment(2)
    assert segment is not None
    memory = SharedMemory(mmap.mmap(segment, 0), 0, [os.getpid()] * 2, TIMEOUT_S)
    os.close(segment)
    return memory


def test_a_group_that_is_aborted_ends_the_collective_of_another_thread() -> None:
    memory = memory_of_two()
    queue = CollectiveQueue(memory)

    def barrier() -> Iterator[None]:
        memory.barrier()
        yield

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.start, barrier(), GroupWork([]), False)
        wait_until(lambda: memory.slots[SLEEPING_WORD])
        queue.abort()
        with pytest.raises(RuntimeError, match="this rank has left the process group"):
            waiting.result(TIMEOUT_S)
    queue.close()


def test_an_output_that_cannot_be_completed_fails_and_keeps_no_later_collective() -> None:
    queue = CollectiveQueue(memory_of_two(), uses_network=True)  # so that the thread runs all

    def fail() -> Iterator[None]:
        yield
        raise ValueError("no such output")

    failed = queue.start(fail(), GroupWork([]), True)
    with pytest.raises(RuntimeError, match="ValueError: no such output"):
        failed.wait()
    with pytest.raises(RuntimeError, match="no such output"):  # the group is of no more use
        queue.start(iter(()), GroupWork([]), False)
    queue.close()


class EndsAfterWait(dist.Work):
    """Work of gloo that ends between the end of a wait and the next look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self, _: timedelta) -> bool:  # type: ignore[override]
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self.waits > 0


def test_a_collective_of_gloo_that_ends_just_after_a_wait_has_not_failed() -> None:
    assert wait_for_collective(EndsAfterWait(), timedelta(0), lambda: None)


def formed_again() -> list[tuple[bool, float]]:
    """Groups of one name: torch takes it from the ranks."""
    results = []
    for _round in range(20):
        group = dist.new_group([0, 1], backend="stepladder", use_local_synchronization=True)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        results.append((group.is_shared, total.item()))
        dist.destroy_process_group(group)
    return results


def test_a_group_that_is_formed_again_under_its_name_shares_memory_again() -> None:
    assert run_ranks(formed_again, 2) == [[(True, 2.0)] * 20] * 2


def refused() -> list[str]:
    """What gloo refuses is refused on shared memory, in gloo's words."""
    group = dist.new_group(backend="stepladder")
    size = dist.get_world_size(group)
    calls = [
        lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0), group),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16), group=group),
        lambda: dist.all_gather_single(torch.ones(2 * size).double(), torch.ones(2), group),
    ]
    messages = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        messages.append(str(caught.value))
    mean = torch.full((3,), dist.get_rank(group) + 1.0)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group)
    assert mean.tolist() == [(size + 1) / 2] * 3
    return messages


def test_what_gloo_refuses_is_refused() -> None:
    for messages in run_ranks(refused, 2):
        for message, part in zip(
            messages,
            ("PREMUL_SUM", "BAND", "Invalid scalar type", "invalid tensor type"),
            strict=True,
        ):
            assert part in message
