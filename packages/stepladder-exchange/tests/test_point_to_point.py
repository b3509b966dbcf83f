"""Messages of two ranks in shared memory: who gets which, and a peer that ends. All ranks are here."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from exchange_ranks import TIMEOUT_S
from stepladder_exchange.channel import RING_BYTES
from stepladder_exchange.message_queue import MessageQueue
from stepladder_exchange.messages import PeerMessage
from stepladder_exchange.shared_memory import SharedMemory
from stepladder_exchange.shared_segment import make_segment

LONG = timedelta(seconds=TIMEOUT_S)
ANY: list[int] = []
LARGE = 3 * RING_BYTES // 4 + 1  # numbers that do not fit into a channel


@contextmanager
def message_queues(pids: list[int]) -> Iterator[list[MessageQueue]]:
    """Of each rank; the ends of these processes are watched for."""
    segment = make_segment(len(pids))
    assert segment is not None
    mapping = mmap.mmap(segment, 0)
    os.close(segment)
    memories = [SharedMemory(mapping, rank, pids, TIMEOUT_S) for rank in range(len(pids))]
    boxes = [MessageQueue(memory) for memory in memories]
    yield boxes
    for box, memory in zip(boxes, memories, strict=True):
        box.close()
        memory.leave_group()


@contextmanager
def peer_in_another_process() -> Iterator[
    tuple[MessageQueue, MessageQueue, subprocess.Popen[bytes]]
]:
    """Rank 0, and rank 1 as if it were in a process that can be killed."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        try:
            with message_queues([os.getpid(), process.pid]) as (own, peer):
                yield own, peer, process
        finally:
            process.kill()


def number(value: float) -> torch.Tensor:
    return torch.tensor([value])


def received(box: MessageQueue, source: list[int], tag: int = 0, length: int = 1) -> list[float]:
    target = torch.zeros(length)
    message = box.receive(target, source, tag, LONG)
    message.wait()
    return [float(message._source_rank()), *target.tolist()]


def test_a_message_goes_to_who_asks_for_its_tag_in_the_order_of_sending() -> None:
    with message_queues([os.getpid()] * 3) as (first, second, third):
        early = torch.zeros(1)
        awaited = first.receive(early, ANY, 9, LONG)
        for value, tag in ((1.0, 5), (2.0, 6), (3.0, 5)):
            second.send(number(value), 0, tag, LONG).wait()
        third.send(number(4.0), 0, 5, LONG).wait()
        assert received(first, [1], 6) == [1, 2.0]
        assert received(first, [2], 5) == [2, 4.0]
        assert received(first, [1], 5) == [1, 1.0]
        assert received(first, ANY, 5) == [1, 3.0]
        assert not awaited.is_completed()
        third.send(number(7.0), 0, 9, LONG).wait()
        assert awaited.wait() and early.item() == 7.0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.zeros(0),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3j]),
        torch.arange(12).view(3, 4)[1:],
        torch.arange(LARGE),
    ],
    ids=["scalar", "empty", "bool", "complex", "rows", "large"],
)
def test_the_bytes_of_a_tensor_arrive(tensor: torch.Tensor) -> None:
    with message_queues([os.getpid()] * 2) as (first, second):
        target = torch.zeros_like(tensor)
        sent = first.send(tensor, 1, 0, LONG)
        second.receive(target, [0], 0, LONG).wait()
        assert sent.wait() and torch.equal(target, tensor)


def test_ranks_that_both_send_more_than_fits_before_they_receive_do_not_wait_for_ever() -> None:
    with message_queues([os.getpid()] * 2) as boxes:
        sent = [
            box.send(torch.full((LARGE,), 1.0 + n), 1 - n, 0, LONG) for n, box in enumerate(boxes)
        ]
        targets = [torch.zeros(LARGE) for _ in boxes]
        for n, box in enumerate(boxes):
            box.receive(targets[n], [1 - n], 0, LONG).wait()
        assert all(message.wait() for message in sent)
        assert [target.unique().tolist() for target in targets] == [[2.0], [1.0]]


def test_a_message_may_be_shorter_than_its_tensor_but_not_longer() -> None:
    with message_queues([os.getpid()] * 2) as (first, second):
        for length in (1, 3, 2):
            first.send(torch.ones(length), 1, 0, LONG).wait()
        assert received(second, [0], length=2) == [0, 1.0, 0.0]
        with pytest.raises(RuntimeError, match="rank 0 sends 12 bytes to rank 1, which expects 8"):
            received(second, [0], length=2)
        assert received(second, [0], length=2) == [0, 1.0, 1.0]


def test_what_a_rank_had_sent_before_it_ended_arrives_and_no_more_is_awaited() -> None:
    with peer_in_another_process() as (own, peer, process):
        awaited = own.receive(torch.zeros(1), [1], 3, LONG)
        peer.send(number(2.0), 0, 0, LONG).wait()
        process.kill()
        with pytest.raises(RuntimeError, match="rank 1 has gone"):
            awaited.wait()
        assert received(own, [1]) == [1, 2.0]
        for source in ([1], ANY):
            with pytest.raises(RuntimeError, match="rank 1 has gone"):
                received(own, source)
        with pytest.raises(RuntimeError, match="rank 1 has gone"):
            own.send(number(1.0), 1, 0, LONG).wait()


@pytest.mark.parametrize("sends", [True, False])
def test_a_message_that_is_on_its_way_when_its_peer_ends_fails(sends: bool) -> None:
    """gloo does not tell who waits for such a message."""
    with peer_in_another_process() as (own, peer, process):
        large = torch.ones(LARGE)
        if sends:
            message: PeerMessage = own.send(large, 1, 0, LONG)
        else:
            begun = peer.send(large, 0, 0, LONG)
            peer.close()
            with pytest.raises(RuntimeError, match="the process group was destroyed"):
                begun.wait()
            message = own.receive(large, [1], 0, LONG)
        process.kill()
        with pytest.raises(RuntimeError, match="rank 1 has gone"):
            message.wait()


def test_a_rank_that_sends_nothing_in_time_is_named_and_ends_all_messages() -> None:
    with message_queues([os.getpid()] * 3) as (first, _, _):
        other = first.receive(torch.zeros(1), [2], 0, LONG)
        late = first.receive(torch.zeros(1), [1], 0, timedelta(milliseconds=50))
        for message in (late, other):
            with pytest.raises(RuntimeError, match=r"timed out: rank 1 did not send in 0\.05 s"):
                message.wait()
        with pytest.raises(RuntimeError, match="timed out"):
            first.send(number(1.0), 1, 0, LONG)


def test_a_group_that_ends_leaves_no_thread_and_nobody_waiting() -> None:
    with message_queues([os.getpid()] * 2) as (first, _):
        awaited = first.receive(torch.zeros(1), [1], 0, LONG)
        [thread] = [thread for thread in threading.enumerate() if thread.name == "messages"]
        first.close()
        with pytest.raises(RuntimeError, match="the process group was destroyed"):
            awaited.wait()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
