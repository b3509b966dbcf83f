"""Agents meet through the run directory: one generation for all; only its members begin the next
one.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any, cast

import pytest

from processes import SECONDS
from stepladder.core.address import find_free_port, is_local, parse_endpoint
from stepladder.core.errors import InputError
from stepladder.launcher.nodes.generation import Generation, NodeExcluded, RendezvousMoved
from stepladder.launcher.nodes.node_ids import NodeIds
from stepladder.launcher.nodes.policy import End
from stepladder.launcher.nodes.run_dir_rendezvous import STORE_NODE_SILENCE_S, RunDirRendezvous
from stepladder.storage.lock import RunDirLock, read_owner
from stepladder.storage.run_dir import move_run_dir_aside


class Stores:
    """Listening sockets in the place of stores, and the file system's time: it stands still until
    it is told.

    However slow this machine is, a node that was heard of in a test is then not silent.
    """

    def __init__(self, published: Path) -> None:
        self.published = published
        self.sockets: list[socket.socket] = []
        self.now = 1_000_000.0

    def touch(self, path: Path) -> None:
        os.utime(path, (self.now, self.now))

    def serve(self, port: int) -> int:
        self.sockets.append(socket.create_server(("127.0.0.1", port)))
        return self.sockets[-1].getsockname()[1]

    def lose(self, seconds: float = STORE_NODE_SILENCE_S + 1) -> None:
        """Their node is gone; so many seconds ago it touched the file for the last time."""
        self.cut()
        self.touch(self.published)
        self.now += seconds

    def cut(self) -> None:
        """Their node cannot be reached, but goes on."""
        for opened in self.sockets:
            opened.close()


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    opened = Stores(tmp_path / "run/rendezvous.json")
    yield opened
    opened.cut()


@pytest.fixture
def agent(tmp_path: Path, stores: Stores) -> Iterator[Callable[..., RunDirRendezvous]]:
    """Makes agents' rendezvous in tmp_path/run; all have left at the end."""
    made: list[RunDirRendezvous] = []

    def make(
        endpoint: str = "",
        fresh: bool = False,
        timeout: float = 2.0,
        job_digest: str = "",
        max_nodes: int = 0,
    ) -> RunDirRendezvous:
        made.append(
            RunDirRendezvous(
                tmp_path / "run",
                "127.0.0.1",
                endpoint,
                fresh,
                timeout,
                stores.touch,
                job_digest,
                max_nodes,
            )
        )
        return made[-1]

    yield make
    for rendezvous in made:
        rendezvous.leave()


def test_the_first_agent_serves_and_the_others_find_it(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    first = agent().join(stores.serve)
    assert first == Generation(1, "127.0.0.1", stores.sockets[0].getsockname()[1])
    assert agent().join(stores.serve) == first
    assert len(stores.sockets) == 1


def test_many_at_once_agree_on_one_store(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    generations: list[Generation] = []
    rendezvous = [agent(timeout=SECONDS) for _ in range(8)]
    threads = [
        threading.Thread(target=lambda m=m: generations.append(m.join(stores.serve)))
        for m in rendezvous
    ]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(generations) == 8
    assert len(set(generations)) == 1


def test_a_member_begins_the_next_generation_and_a_newcomer_does_not(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    member = agent()
    newcomer = agent(timeout=0.2)
    member.join(stores.serve)
    stores.lose()
    with pytest.raises(InputError, match="no rendezvous answered at 127"):
        newcomer.join(stores.serve)
    assert member.join(stores.serve).number == 2
    assert newcomer.join(stores.serve).number == 2


def test_who_is_cut_off_from_a_living_node_does_not_replace_it(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    cut_off = agent(timeout=0.2)
    server = agent()
    server.join(stores.serve)
    cut_off.join(stores.serve)
    stores.lose()
    assert server.poll() is None  # touches the file
    with pytest.raises(InputError, match="no rendezvous answered"):
        cut_off.join(stores.serve)


@pytest.mark.parametrize(
    ("seconds", "number"), [(STORE_NODE_SILENCE_S, 1), (STORE_NODE_SILENCE_S + 0.5, 2)]
)
def test_a_node_is_lost_once_it_was_silent_for_longer_than_the_limit(
    seconds: float, number: int, agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    server = agent()
    member = agent(timeout=0.2)
    server.join(stores.serve)
    member.join(stores.serve)
    stores.lose(seconds)
    with suppress(InputError):
        member.join(stores.serve)
    published = server.read()
    assert published is not None and published.number == number


def test_a_newcomer_takes_the_place_of_a_lost_node_when_no_member_has_in_time(
    agent: Callable[..., RunDirRendezvous], stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = agent()
    newcomer = agent()
    member.join(stores.serve)
    stores.lose()
    monkeypatch.setattr("stepladder.launcher.nodes.run_dir_rendezvous.NEW_AGENT_DELAY_S", 0.5)
    assert newcomer.join(stores.serve).number == 2
    assert member.join(stores.serve).number == 2


def test_who_is_cut_off_from_a_newer_generation_does_not_replace_it(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    cut_off = agent(timeout=0.2)
    member = agent()
    cut_off.join(stores.serve)
    member.join(stores.serve)
    stores.lose()
    member.join(stores.serve)
    stores.lose()
    with pytest.raises(InputError, match="no rendezvous answered"):
        cut_off.join(stores.serve)
    assert member.join(stores.serve).number == 3


def test_a_newcomer_who_is_left_alone_begins_anew(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    member = agent()
    newcomer = agent(timeout=0.2)
    member.join(stores.serve)
    stores.lose()
    with pytest.raises(InputError):
        newcomer.join(stores.serve)
    member.leave()
    assert newcomer.join(stores.serve).number == 2


def test_the_end_is_told_to_all_and_the_first_word_counts(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    first = agent()
    second = agent()
    late = agent()
    first.join(stores.serve)
    second.join(stores.serve)
    assert second.poll() is None
    assert first.end(0, "well") == 0
    assert second.end(1, "too late") == 0
    assert second.read_end() == End(0, "well")
    assert second.poll() is None  # it looks once a second at most
    second._polled_at = 0.0
    assert second.poll() == End(0, "well")
    assert late.join(stores.serve).end == late.poll() == End(0, "well")


def test_who_was_left_behind_moves_on_and_can_be_called_away_meanwhile(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    behind = agent()
    member = agent()
    behind.join(stores.serve)
    member.join(stores.serve)
    stores.lose()
    member.join(stores.serve)
    with pytest.raises(RendezvousMoved):
        behind.poll()
    stores.lose(seconds=0)

    def check() -> None:
        """Called while it joins, when to look says nothing new."""
        assert behind.poll() is None
        raise InterruptedError

    with pytest.raises(InterruptedError):
        behind.join(stores.serve, check)


def test_a_new_launch_counts_from_one(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    old = agent()
    old.join(stores.serve)
    old.end(1, "failed")
    with pytest.raises(InputError):
        agent(timeout=0.2).join(stores.serve)  # until the old one's agents have left
    old.leave()
    assert agent().join(stores.serve) == Generation(
        1, "127.0.0.1", stores.sockets[-1].getsockname()[1]
    )


def test_fresh_moves_the_run_aside_once_per_launch(
    agent: Callable[..., RunDirRendezvous], stores: Stores, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    agent(fresh=True).join(stores.serve)
    assert (tmp_path / "run.old-1/config.json").exists()
    (tmp_path / "run/config.json").write_text("{}")
    assert agent(fresh=True).join(stores.serve).number == 1  # a node that comes back
    assert not (tmp_path / "run.old-2").exists()


def test_a_run_on_one_machine_keeps_a_launch_out_and_a_launch_keeps_it_out(
    agent: Callable[..., RunDirRendezvous], stores: Stores, tmp_path: Path
) -> None:
    """Also while no rank of the launch has the lock: before its first start, and when its first
    node is lost.
    """
    run = tmp_path / "run"
    run.mkdir()
    alone = RunDirLock(run, 0)
    alone.write_owner({})
    refused = agent(timeout=0.2)
    with pytest.raises(InputError, match=f"is in use by process {os.getpid()} "):
        refused.join(stores.serve)
    assert read_owner(run)["token"] == alone.token
    refused.leave()
    alone.release()
    first = agent()
    second = agent()
    first.join(stores.serve)
    second.join(stores.serve)
    for lost in (first, second):
        with pytest.raises(InputError, match="in use"):
            RunDirLock(run, 0)
        RunDirLock(run, 0, is_multi_node=True).release()
        lost.leave()
    RunDirLock(run, 0).release()


def test_fresh_moves_no_live_run_aside_and_none_that_came_meanwhile(
    agent: Callable[..., RunDirRendezvous],
    stores: Stores,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    alone = RunDirLock(run, 0)
    refused = agent(fresh=True, timeout=0.2)
    with pytest.raises(InputError, match="is in use"):
        refused.join(stores.serve)
    refused.leave()
    alone.release()
    assert not (tmp_path / "run.old-1").exists()

    def slip_in(path: Path, *args: Any, **flags: Any) -> None:
        move_run_dir_aside(path, *args, **flags)
        path.mkdir()
        (path / "config.json").write_text("another's")

    monkeypatch.setattr("stepladder.launcher.nodes.run_dir_rendezvous.move_run_dir_aside", slip_in)
    with pytest.raises(InputError, match="is in use"):
        agent(fresh=True).join(stores.serve)
    assert (run / "config.json").read_text() == "another's"
    assert not (tmp_path / "run.old-2").exists()


def test_a_launch_of_other_settings_is_refused_at_once(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    first = agent(job_digest="one")
    second = agent(timeout=SECONDS, job_digest="other")
    first.join(stores.serve)
    with pytest.raises(InputError, match="a launch with another job or settings"):
        second.join(stores.serve)


CLAIM = """
import sys
from pathlib import Path
from stepladder.launcher.nodes.node_ids import NodeIds
node_ids = NodeIds(Path(sys.argv[1]), max_nodes=2)
print(node_ids.claim([]), flush=True)
sys.stdin.read()
"""


def test_there_are_as_many_seats_as_nodes_beside_those_that_are_given_up(tmp_path: Path) -> None:
    """The others are processes, as locks of a process do not keep itself out."""
    path = tmp_path / "ids"
    node_ids = NodeIds(path, max_nodes=2)
    with ExitStack() as stack:
        for claimed in ("True", "True", "False"):
            command = sys.executable, "-c", CLAIM, str(path)
            holder = stack.enter_context(
                subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
            )
            stack.callback(holder.communicate)
            assert holder.stdout is not None and holder.stdout.readline() == f"{claimed}\n"
        assert not node_ids.claim([])
        assert node_ids.claim([0]) and node_ids.own_id == 2
        assert node_ids.claim([0]) and node_ids.own_id == 2
        assert node_ids.claim([0, 2]) and node_ids.own_id == 3  # cut off, and back
    node_ids.release()
    assert node_ids.claim([]) and node_ids.own_id == 4  # the others have ended


def test_a_node_that_the_others_go_on_without_loses_its_seat_and_its_word(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    survivor = agent(max_nodes=2)
    cut_off = agent(max_nodes=2)
    for rendezvous in (survivor, cut_off):
        rendezvous.join(stores.serve)
    assert cut_off.poll() is None
    survivor.poll([1])
    assert survivor.read() == replace(cast(Generation, survivor.current), given_up=(1,))
    cut_off._polled_at = 0.0
    with pytest.raises(NodeExcluded):
        cut_off.poll()
    cut_off.end(1, "failed")
    assert survivor.read_end() is None
    assert cut_off.join(stores.serve).number == 1
    assert cut_off.node_ids.own_id == 2
    stores.lose()
    assert survivor.join(stores.serve).given_up == (1,)


def test_without_locks_several_nodes_are_refused_with_what_to_ask_for(
    agent: Callable[..., RunDirRendezvous], stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(
        InputError, match=r"has no locks, which several nodes need: Function not .*-o flock"
    ):
        agent().join(stores.serve)


def test_the_endpoint_is_served_where_it_is_local(
    agent: Callable[..., RunDirRendezvous], stores: Stores
) -> None:
    port = find_free_port()  # none that Linux gives away meanwhile
    far = agent(endpoint=f"192.0.2.1:{port}", timeout=0.2)
    near = agent(endpoint=f"127.0.0.1:{port}")
    with pytest.raises(InputError, match=f"192.0.2.1:{port}"):
        far.join(stores.serve)
    assert near.join(stores.serve).port == port
    assert far.join(stores.serve).port == port


def test_addresses() -> None:
    assert parse_endpoint("node1:29400") == ("node1", 29400)
    assert parse_endpoint("[::1]:80") == ("::1", 80)
    for bad in ("node1", ":80", "[::1:80", "a b:80", "node1:x", "node1:70000"):
        with pytest.raises(InputError, match="HOST:PORT"):
            parse_endpoint(bad)
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")
