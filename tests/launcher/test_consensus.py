"""How nodes agree on who trains on: over a real store of torch, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from stepladder.launcher.local.consensus import NodeVote, Quorum, form_quorum
from stepladder.launcher.nodes.introduction import announce_start, join_running_start
from stepladder.launcher.nodes.liveness import LivenessConnections
from stepladder.launcher.nodes.local_node import NodeInfo
from stepladder.launcher.nodes.peers import BROKEN_KEY, ENDED_KEY, Peers
from stepladder.launcher.nodes.store_consensus import StoreConsensus
from stepladder.rank.membership import Membership

Assemble = Callable[..., list[StoreConsensus]]


def make_vote(
    *members: int, trained: int | None = None, reasons: str = "broken", lost: int = 0
) -> NodeVote:
    return NodeVote(
        list(members),
        len(members) if trained is None else trained,
        reasons.split(),
        lost,
        False,
        "file:///meeting",
        f"node-of-{members[0] if members else 'nobody'}:1",
    )


@pytest.fixture
def assembled() -> Iterator[Callable[..., list[StoreConsensus]]]:
    """Return a function that makes the consensus member of each node of a launch."""
    with ExitStack() as stack:

        def assemble(*nprocs: int, least: int = 1) -> list[StoreConsensus]:
            store = HashStore()
            lines = [stack.enter_context(closing(LivenessConnections("127.0.0.1"))) for _ in nprocs]
            peers = [Peers(store, number, len(nprocs), "secret") for number in range(len(nprocs))]
            infos = [
                NodeInfo(n, liveness_address=line.address, node_id=7 + n)
                for n, line in zip(nprocs, lines, strict=True)
            ]
            with ThreadPoolExecutor(len(nprocs)) as threads:
                list(threads.map(Peers.introduce, peers, infos))
            return [
                StoreConsensus(own_peers, least, line)
                for own_peers, line in zip(peers, lines, strict=True)
            ]

        yield assemble


def test_the_ranks_of_all_nodes_meet_on_the_first_one_s_node() -> None:
    answer = form_quorum(3, {0: make_vote(1, lost=1), 1: make_vote(2, 3)})
    assert answer.membership == Membership(3, [1, 2, 3], [0, 1, 1], "tcp://node-of-1:1")


def test_the_step_of_a_failure_is_known_on_all_nodes() -> None:
    failed = replace(make_vote(0, lost=1), failed_step=5)
    assert form_quorum(1, {0: failed, 1: make_vote(1)}).failed_step == 5


def test_those_of_one_node_meet_there() -> None:
    answer = form_quorum(1, {0: make_vote(lost=2), 1: make_vote(2, 3)})
    assert answer.membership == Membership(1, [2, 3], [1, 1], "file:///meeting")


@pytest.mark.parametrize(
    ("votes", "forms"),
    [
        ([make_vote(0), make_vote(1, lost=1)], True),
        ([make_vote(0), make_vote(1)], False),  # it broke without a loss, and would again
        ([make_vote(0, reasons="late"), make_vote(1, reasons="broken")], True),  # a slow meeting
        (
            [make_vote(0, reasons="left"), make_vote(1, 2, trained=1, reasons="broken left")],
            True,
        ),  # another one joins
        ([make_vote(lost=1), make_vote(lost=1)], False),  # nobody has the state
        ([make_vote(3, trained=0, reasons="left", lost=1), make_vote(lost=1)], False),
        ([make_vote(0), replace(make_vote(1, lost=1), is_permanent=True)], False),
    ],
)
def test_a_group_is_formed_only_where_it_may_last(votes: list[NodeVote], forms: bool) -> None:
    assert (form_quorum(1, dict(enumerate(votes))).membership is not None) == forms


def test_nodes_agree_when_all_have_given_their_word(assembled: Assemble) -> None:
    first, second = assembled(2, 1)
    first.report_loss()
    second.poll()
    assert second.loss_reported
    assert first.vote(make_vote(1, lost=1)) is None
    assert second.vote(make_vote(2)) is None  # the first one says what all agree on
    result = first.vote(make_vote(1, lost=1))
    assert (
        result
        == second.vote(make_vote(2))
        == Quorum(Membership(1, [1, 2], [0, 1], "tcp://node-of-1:1"), 1)
    )
    assert (first.group_number, second.loss_reported, second.join_requested) == (2, False, False)


def test_a_word_may_change_until_all_agree(assembled: Assemble) -> None:
    first, second = assembled(1, 2)
    second.vote(make_vote(1, 2))
    second.vote(make_vote(1, lost=1))
    assert first.vote(make_vote(0)) == Quorum(Membership(1, [0, 1], [0, 1], "tcp://node-of-0:1"), 1)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_others_go_on_without_a_node_that_has_ended(
    assembled: Assemble, lost: int, capsys: pytest.CaptureFixture[str]
) -> None:
    members = assembled(1, 1, 1)
    remaining = [member for member in members if member.node != lost]
    for member in remaining:
        member.poll()
        assert not member.loss_reported
    members[lost].liveness.close()
    for member in remaining:
        member.poll()
    assert remaining[0].loss_reported
    votes = {member.node: make_vote(member.node) for member in remaining}
    for member in remaining:
        member.vote(votes[member.node])
    nodes = [member.node for member in remaining]
    answers = [member.vote(votes[member.node]) for member in remaining]
    expected = Membership(1, nodes, nodes, f"tcp://node-of-{nodes[0]}:1", ["1 node was lost"])
    assert answers == [Quorum(expected, 1)] * 2
    assert f"node {lost} is lost: the others go on without it" in capsys.readouterr().err
    assert members[lost].vote(make_vote(lost)) == Quorum(None)
    assert members[lost].excluded


def test_too_few_nodes_do_not_go_on(assembled: Assemble) -> None:
    first, _ = assembled(1, 1, least=2)
    first.mark_lost(1)
    answer = first.vote(make_vote(0))
    assert answer is not None
    assert answer.membership is None


def test_a_node_whose_ranks_have_failed_lets_nobody_wait(assembled: Assemble) -> None:
    first, second = assembled(1, 1)
    second.report_ended(well=False)
    assert first.vote(make_vote(0)) == Quorum(None)


@pytest.mark.parametrize("done", [0, 1])
def test_a_node_whose_ranks_are_done_is_not_waited_for(assembled: Assemble, done: int) -> None:
    members = assembled(2, 2)
    members[done].report_ended(well=True)
    survivor = members[1 - done]
    answer = survivor.vote(make_vote(2 * survivor.node, lost=1))
    assert answer is not None
    assert answer.membership is not None
    assert answer.membership.members == [2 * survivor.node]


def test_a_node_that_comes_is_one_of_them_from_then_on(assembled: Assemble) -> None:
    """Its rank joins, then the first node is lost, and another one comes."""
    first, second = assembled(1, 1)
    store = first.peers.shared_store
    known = NodeInfo(1, attempt=0)
    announce_start(first.peers, known)
    assert join_running_start(store, "secret", known) is None, "it was in this start"
    with (
        closing(LivenessConnections("127.0.0.1")) as line,
        closing(LivenessConnections("127.0.0.1")) as last_line,
    ):
        third, ranks = newcomer(store, line)
        assert (third.node, third.group_number, ranks) == (2, 1, [2])
        third.request_join()
        for member in (first, second):
            member.poll()
            assert member.join_requested
        joining = make_vote(2, trained=0, reasons="left")
        assert third.vote(joining) is None
        assert second.vote(make_vote(1, reasons="left")) is None
        result = first.vote(make_vote(0, reasons="left"))
        assert result == Quorum(Membership(1, [0, 1, 2], [0, 1, 2], "tcp://node-of-0:1"))
        assert result == second.vote(make_vote(1, reasons="left")) == third.vote(joining)
        first.liveness.close()
        second.poll()
        third.poll()
        assert second.loss_reported
        fourth, ranks = newcomer(store, last_line)
        assert (fourth.node, fourth.group_number, ranks) == (3, 2, [3])
        assert fourth.peers.living_nodes == [1, 2, 3]


@pytest.mark.parametrize("key", [BROKEN_KEY, ENDED_KEY])
def test_nobody_comes_to_a_start_that_is_over(assembled: Assemble, key: str) -> None:
    (first,) = assembled(1)
    assert join_running_start(first.peers.shared_store, "secret", NodeInfo(1)) is None
    announce_start(first.peers, NodeInfo(1, attempt=0))
    first.board.write(key)
    assert join_running_start(first.peers.shared_store, "secret", NodeInfo(1)) is None


def newcomer(store: Store, line: LivenessConnections) -> tuple[StoreConsensus, list[int]]:
    """As one node of the start, and its ranks."""
    result = join_running_start(store, "secret", NodeInfo(1, liveness_address=line.address))
    assert result is not None
    peers, _ = result
    return StoreConsensus(peers, 1, line), list(peers.assign_ranks(1))


def test_no_two_new_ranks_have_one_number(assembled: Assemble) -> None:
    members = assembled(3, 1, 2)
    numbers = []
    for member, largest in zip(members, (2, 3, 5), strict=True):
        for _ in range(4):
            largest = member.new_rank(largest)
            numbers.append(largest)
    assert len(set(numbers)) == 12
    assert min(numbers) == 6
    assert max(numbers) == 17


def test_a_port_is_chosen_when_ranks_are_to_meet_there(
    assembled: Assemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was free days before may be another program's by then."""
    chosen = iter(range(20_000, 20_010))
    monkeypatch.setattr(
        "stepladder.launcher.nodes.store_consensus.find_free_port", lambda: next(chosen)
    )
    (member,) = assembled(1)
    assert next(chosen) == 20_000, "none was taken before"
    assert member.address.endswith(":20001")
    assert member.address.endswith(":20001")  # all votes of one group name it
