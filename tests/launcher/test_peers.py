"""What agents tell each other through a store: real stores of torch, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from stepladder.launcher.nodes.local_node import NodeInfo
from stepladder.launcher.nodes.peers import Peers
from stepladder.launcher.nodes.policy import NODE_SILENCE_S


class Clock:
    """Stands still until it is told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def introduced(nodes: list[Peers], *infos: NodeInfo) -> list[NodeInfo]:
    with ThreadPoolExecutor(len(infos)) as threads:
        return list(threads.map(Peers.introduce, nodes, infos))


def introduce_nodes(store: HashStore, clock: Clock, *infos: NodeInfo) -> list[Peers]:
    """All nodes of one start, after their introductions."""
    nodes = [Peers(store, number, len(infos), "secret", clock) for number in range(len(infos))]
    introduced(nodes, *infos)
    return nodes


def test_ranks_go_on_from_node_to_node(clock: Clock) -> None:
    nodes = introduce_nodes(HashStore(), clock, NodeInfo(2), NodeInfo(4), NodeInfo(1))
    assert [node.first_rank for node in nodes] == [0, 2, 6]
    assert [node.world_size for node in nodes] == [7, 7, 7]


def test_nodes_agree_on_a_new_number_and_on_the_step_that_failed_last() -> None:
    store = HashStore()
    infos = NodeInfo(2, 3, failed=(1, 40)), NodeInfo(4, 6, failed=(3, 7)), NodeInfo(1)
    agreed = introduced([Peers(store, number, 3, "secret") for number in range(3)], *infos)
    assert agreed == [NodeInfo(nproc, 7, (3, 7)) for nproc in (2, 4, 1)]


def test_a_node_is_lost_when_it_was_silent_for_longer_than_the_limit(clock: Clock) -> None:
    first, second, third = introduce_nodes(HashStore(), clock, *[NodeInfo(1)] * 3)
    assert [node.find_silent_node() for node in (second, third, first)] == [None] * 3
    clock.now += NODE_SILENCE_S
    assert [node.find_silent_node() for node in (second, first)] == [None, None]
    clock.now += 1.5
    assert second.find_silent_node() is None
    assert first.find_silent_node() == 2
    clock.now += 1.5
    third.find_silent_node()
    clock.now += 1.5
    assert first.find_silent_node() is None  # it was only slow


def test_the_others_notice_the_loss_of_node_0(clock: Clock) -> None:
    first, second = introduce_nodes(HashStore(), clock, *[NodeInfo(1)] * 2)
    first.find_silent_node()
    assert second.find_silent_node() is None
    clock.now += NODE_SILENCE_S + 0.1
    assert second.find_silent_node() == 0


def test_of_a_silence_nobody_is_asked_more_than_once_a_second(clock: Clock) -> None:
    first, second = introduce_nodes(HashStore(), clock, *[NodeInfo(1)] * 2)
    second.find_silent_node()
    first.find_silent_node()
    clock.now += NODE_SILENCE_S + 2
    assert first.find_silent_node() == 1
    clock.now += 0.9
    assert first.find_silent_node() is None


def test_a_failure_is_of_one_start(clock: Clock) -> None:
    store = HashStore()
    first, second = introduce_nodes(store, clock, *[NodeInfo(1)] * 2)
    assert not second.is_broken and second.wait_for_cause(seconds=0) == ""
    first.report_cause("rank 0 failed: KeyError")
    first.report_broken()
    assert second.is_broken and second.wait_for_cause() == "node 0: rank 0 failed: KeyError"
    first, second = introduce_nodes(store, clock, *[NodeInfo(1, attempt=0)] * 2)
    assert not second.is_broken and second.wait_for_cause(seconds=0) == ""


def test_ranks_of_all_nodes_have_ended_or_patience_has(clock: Clock) -> None:
    first, second = introduce_nodes(HashStore(), clock, *[NodeInfo(1)] * 2)
    assert not first.wait_for_end(lambda: 0)
    assert second.wait_for_end(lambda: 0)


def test_nobody_waits_for_the_end_of_a_node_that_has_failed(clock: Clock) -> None:
    first, second = introduce_nodes(HashStore(), clock, *[NodeInfo(1)] * 2)
    second.report_failed()
    assert first.wait_for_end(lambda: 0)


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
    introduced(nodes, *[NodeInfo(1)] * 2)
    del server
    yield nodes


def test_what_is_told_when_the_store_has_gone_is_lost_without_an_error(lost: list[Peers]) -> None:
    first, second = lost
    first.report_cause("text")
    first.report_broken()
    first.report_failed()
    assert second.wait_for_cause(seconds=0) == ""
    assert first.wait_for_end(lambda: 30)  # who served it has seen all end
