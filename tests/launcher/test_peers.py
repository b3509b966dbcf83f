"""What agents tell each other through a store: real stores of torch, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from stepladder.launcher.nodes.own_node import Introduction
from stepladder.launcher.nodes.peers import Peers
from stepladder.launcher.nodes.policy import SECONDS_OF_SILENCE


class Clock:
    """Stands still until it is told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def introduced(nodes: list[Peers], *words: Introduction) -> list[Introduction]:
    with ThreadPoolExecutor(len(words)) as threads:
        return list(threads.map(Peers.introduce, nodes, words))


def met(store: HashStore, clock: Clock, *words: Introduction) -> list[Peers]:
    """All nodes of one start, after their introductions."""
    nodes = [Peers(store, number, len(words), "secret", clock) for number in range(len(words))]
    introduced(nodes, *words)
    return nodes


def test_ranks_go_on_from_node_to_node(clock: Clock) -> None:
    nodes = met(HashStore(), clock, Introduction(2), Introduction(4), Introduction(1))
    assert [node.first_rank for node in nodes] == [0, 2, 6]
    assert [node.world_size for node in nodes] == [7, 7, 7]


def test_nodes_agree_on_a_new_number_and_on_the_step_that_failed_last() -> None:
    store = HashStore()
    words = Introduction(2, 3, failed=(1, 40)), Introduction(4, 6, failed=(3, 7)), Introduction(1)
    agreed = introduced([Peers(store, number, 3, "secret") for number in range(3)], *words)
    assert agreed == [Introduction(nproc, 7, (3, 7)) for nproc in (2, 4, 1)]


def test_a_node_is_lost_when_it_was_silent_for_longer_than_the_limit(clock: Clock) -> None:
    first, second, third = met(HashStore(), clock, *[Introduction(1)] * 3)
    assert [node.silent() for node in (second, third, first)] == [None] * 3
    clock.now += SECONDS_OF_SILENCE
    assert [node.silent() for node in (second, first)] == [None, None]
    clock.now += 1.5
    assert second.silent() is None
    assert first.silent() == 2
    clock.now += 1.5
    third.silent()
    clock.now += 1.5
    assert first.silent() is None  # it was only slow


def test_the_others_notice_the_loss_of_node_0(clock: Clock) -> None:
    first, second = met(HashStore(), clock, *[Introduction(1)] * 2)
    first.silent()
    assert second.silent() is None
    clock.now += SECONDS_OF_SILENCE + 0.1
    assert second.silent() == 0


def test_of_a_silence_nobody_is_asked_more_than_once_a_second(clock: Clock) -> None:
    first, second = met(HashStore(), clock, *[Introduction(1)] * 2)
    second.silent()
    first.silent()
    clock.now += SECONDS_OF_SILENCE + 2
    assert first.silent() == 1
    clock.now += 0.9
    assert first.silent() is None


def test_a_failure_is_of_one_start(clock: Clock) -> None:
    store = HashStore()
    one, other = met(store, clock, *[Introduction(1)] * 2)
    assert not other.is_broken and other.cause(seconds=0) == ""
    one.tell_cause("rank 0 failed: KeyError")
    one.tell_broken()
    assert other.is_broken and other.cause() == "node 0: rank 0 failed: KeyError"
    one, other = met(store, clock, *[Introduction(1, attempt=0)] * 2)
    assert not other.is_broken and other.cause(seconds=0) == ""


def test_ranks_of_all_nodes_have_ended_or_patience_has(clock: Clock) -> None:
    one, other = met(HashStore(), clock, *[Introduction(1)] * 2)
    assert not one.await_end(lambda: 0)
    assert other.await_end(lambda: 0)


def test_nobody_waits_for_the_end_of_a_node_that_has_failed(clock: Clock) -> None:
    one, other = met(HashStore(), clock, *[Introduction(1)] * 2)
    other.tell_failed()
    assert one.await_end(lambda: 0)


@pytest.fixture
def lost() -> Iterator[list[Peers]]:
    """Two nodes whose store has gone."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [
        TCPStore(
            "127.0.0.1",
            server.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
        )
        for _ in range(2)
    ]
    nodes = [Peers(store, number, 2, "secret") for number, store in enumerate(stores)]
    introduced(nodes, *[Introduction(1)] * 2)
    del server
    yield nodes


def test_what_is_told_when_the_store_has_gone_is_lost_without_an_error(lost: list[Peers]) -> None:
    one, other = lost
    one.tell_cause("text")
    one.tell_broken()
    one.tell_failed()
    assert other.cause(seconds=0) == ""
    assert one.await_end(lambda: 30)  # who served it has seen all end
