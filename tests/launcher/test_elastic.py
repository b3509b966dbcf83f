"""Any rank or node may be lost, come back, or stand still: in exact mode the end has the same bits."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from processes import JOBS, SECONDS, Started, audited, refused, run, started, train, wait_until
from stepladder.core.address import find_free_port

pytestmark = pytest.mark.ranks

GATES = JOBS / "gates.py"
EXACT = "--sync", "exact", "--microbatch", "4", "--snapshot-every", "2"
RUN_DIR = Path("runs/gates")
RESTART = "--on-loss", "restart"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights' hash of one process that nothing happens to."""
    return train(GATES, *EXACT, cwd=tmp_path_factory.mktemp("unbroken"))["weights_sha256"]


def ends_well(tmp_path: Path, unbroken: str) -> dict[str, Any]:
    """The stored result has the weights of the unbroken run, and the ledger is whole."""
    result = json.loads((tmp_path / RUN_DIR / "result.json").read_text())
    assert result["weights_sha256"] == unbroken
    audit = audited(tmp_path / RUN_DIR)
    assert (audit["ok"], audit["lost"], audit["repeated"]) == (True, 0, 0)
    return result


# -- one node --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fail_at_kills_once_and_the_run_recovers(tmp_path: Path, unbroken: str) -> None:
    flags = "--nproc", 3, "--fail-at", "1:7", "--fail-at", "0:13"
    done = run("train", GATES, *EXACT, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "rank 0 was killed by SIGKILL" in done.stderr
    audit = audited(tmp_path / RUN_DIR)
    assert audit["attempts"] == 1  # the others went on
    lost = [(one["step"], one["lost"], one["why"]) for one in audit["history"] if one["lost"]]
    assert lost == [
        (6, [1], ["rank 1 was killed by SIGKILL"]), (12, [0], ["rank 0 was killed by SIGKILL"])
    ], audit["history"]  # fmt: skip
    joined = {rank for one in audit["history"] for rank in one["joined"]}
    assert joined <= {3, 4}, "the last one may come when the run is over"
    assert run("report", RUN_DIR, "-o", "page.html", cwd=tmp_path).returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert f"1 start on 3 processes, {audit['changes']} changes of processes" in page
    # In the charts of the loss, of the metric and of the throughput, which have the same steps.
    assert page.count("<title>after step 6: rank 1 lost (rank 1 was killed by SIGKILL)") == 3
    ends_well(tmp_path, unbroken)


@pytest.mark.slow
def test_a_rank_that_fails_again_and_again_is_left_out(tmp_path: Path, unbroken: str) -> None:
    done = run(
        "train", GATES, *EXACT, "--nproc", "1:3", *RESTART, cwd=tmp_path, env={"DIES": "1 3 5"}
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 failed twice within a minute: continuing with 2 ranks" in done.stderr
    assert ends_well(tmp_path, unbroken)["world_size"] == 2


@pytest.mark.slow
def test_no_fewer_ranks_than_asked_for(tmp_path: Path) -> None:
    flags = "--nproc", "3:3", "--max-restarts", 1, *RESTART
    done = run("train", GATES, *EXACT, *flags, cwd=tmp_path, env={"DIES": "1 3 5"})
    assert done.returncode == 1
    assert "given up after 1 restarts" in done.stderr


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_run_recovers(tmp_path: Path, unbroken: str) -> None:
    marker = tmp_path / "marker"
    flags = "--nproc", 2, "--timeout", 10
    with started(
        "train", GATES, *EXACT, *flags, cwd=tmp_path, env={"HANGS": f"1 7 {marker}"}
    ) as running:
        running.wait_for(marker)
        pid = int(marker.read_text())
        os.kill(pid, signal.SIGSTOP)
        assert running.end() == 0
        assert f"rank 1 (pid {pid}) is stopped (SIGSTOP)" in running.err.read_text()
    ends_well(tmp_path, unbroken)


@pytest.mark.slow
def test_a_hanging_rank_is_named_and_the_run_recovers(tmp_path: Path, unbroken: str) -> None:
    marker = tmp_path / "marker"
    flags = "--nproc", 3, "--timeout", 10
    done = run("train", GATES, *EXACT, *flags, cwd=tmp_path, env={"HANGS": f"1 7 {marker}"})
    assert done.returncode == 0, done.stderr
    named = rf"rank 1 \(pid {marker.read_text()}\) has not reached \w+ \d+ of step 7: it is in hang\(\), gates.py:\d+"
    assert re.search(named, done.stderr), done.stderr
    ends_well(tmp_path, unbroken)


# -- several nodes ---------------------------------------------------------------------------------


class Nodes:
    """Agents on this machine, each as one node; gates hold the training until what has to happen
    has.
    """

    def __init__(self, folder: Path, flags: tuple[object, ...], stack: ExitStack) -> None:
        self.folder = folder
        self.flags = flags
        self.stack = stack
        self.agents: list[Started] = []

    def start(self, count: int = 1, **env: str) -> Started:
        command = (
            "train",
            GATES,
            *EXACT,
            "--local-addr",
            "127.0.0.1",
            "--timeout",
            SECONDS,
            *self.flags,
        )
        temporary = (
            self.folder.parent / "t"
        )  # a killed agent leaves its files; a socket's name must be short
        temporary.mkdir(exist_ok=True)
        gates = {"GATES": f"{self.folder} 7 14", "TMPDIR": str(temporary), **env}
        for _ in range(count):
            self.agents.append(
                self.stack.enter_context(started(*command, cwd=self.folder, env=gates))
            )
        return self.agents[-1]

    def wait_at(self, step: int) -> None:
        wait_until((self.folder / f"at-{step}").exists, self.read_output)
        for agent in self.agents:
            agent.record_family()

    def open(self, *steps: int) -> None:
        for step in steps:
            (self.folder / f"open-{step}").touch()

    def of_store(self) -> Started:
        """The agent that serves the current generation's rendezvous."""
        port = json.loads((self.folder / RUN_DIR / "rendezvous.json").read_text())["port"]
        return next(
            a
            for a in self.running()
            if any(serves(c, port) for c in a.process.net_connections("tcp"))
        )

    def running(self) -> list[Started]:
        return [agent for agent in self.agents if agent.popen.poll() is None]

    def kill(self, agent: Started) -> None:
        """The node is gone: its agent, and its ranks with it."""
        agent.process.kill()
        assert agent.end() == -signal.SIGKILL

    def read_output(self) -> str:
        return "\n".join(agent.err.read_text() for agent in self.agents)

    def end(self) -> list[int]:
        return [agent.end() for agent in self.agents]


def serves(connection: Any, port: int) -> bool:
    return connection.status == psutil.CONN_LISTEN and connection.laddr.port == port


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    @contextmanager
    def make(*flags: object) -> Iterator[Nodes]:
        with ExitStack() as stack:
            yield Nodes(tmp_path, flags, stack)

    return make


def test_two_nodes_give_the_bits_of_one_process(nodes: Any, tmp_path: Path, unbroken: str) -> None:
    with nodes("--nodes", 2, "--nproc", 2, "--json") as cluster:
        cluster.start(2)
        cluster.open(7, 14)
        assert cluster.end() == [0, 0]
        assert "generation 1: nodes 2, ranks 4" in cluster.read_output()
        printed = sorted(agent.out.read_text() for agent in cluster.agents)
    assert printed[0] == "" and json.loads(printed[1])["weights_sha256"] == unbroken
    assert ends_well(tmp_path, unbroken)["world_size"] == 4


@pytest.mark.slow
def test_nodes_killed_in_turn_the_stores_too(nodes: Any, tmp_path: Path, unbroken: str) -> None:
    with nodes("--nodes", "1:3") as cluster:
        cluster.start(3, TOGETHER="3")
        cluster.wait_at(7)
        assert "generation 1: nodes 3, ranks 3" in cluster.read_output()
        cluster.kill(next(agent for agent in cluster.running() if agent is not cluster.of_store()))
        cluster.open(7)
        cluster.wait_at(14)
        assert "is lost: the others go on without it" in cluster.read_output()
        assert "in-place recovery: continuing with 2 processes" in cluster.read_output()
        assert audited(tmp_path / RUN_DIR)["attempts"] == 1
        wait_until((tmp_path / RUN_DIR / "snapshots/step_00000012").exists)
        cluster.kill(cluster.of_store())
        cluster.open(14)
        assert sorted(cluster.end()) == [-signal.SIGKILL, -signal.SIGKILL, 0]
        assert "generation 2: nodes 1, ranks 1" in cluster.read_output()
    result = ends_well(tmp_path, unbroken)
    assert (result["world_size"], result["resumed_from_step"]) == (1, 12)


@pytest.mark.slow
def test_a_lost_rank_restarts_all_nodes_where_that_is_asked_for(
    nodes: Any, tmp_path: Path, unbroken: str
) -> None:
    with nodes(
        "--nodes",
        2,
        "--nproc",
        2,
        "--fail-at",
        "3:5",
        "--rdzv-endpoint",
        f"127.0.0.1:{find_free_port()}",
        *RESTART,
    ) as cluster:
        cluster.start(2)
        cluster.open(7, 14)
        assert cluster.end() == [0, 0]
        assert "rank 3 was killed by SIGKILL" in cluster.read_output()
        assert "a rank on another node was lost" in cluster.read_output()
    ends_well(tmp_path, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "lost"), [(2, 3), (1, 0)]
)  # the last one; the writer, and its node's only one
def test_the_ranks_of_all_nodes_go_on_without_a_lost_one(
    nproc: int, lost: int, nodes: Any, tmp_path: Path, unbroken: str
) -> None:
    with nodes("--nodes", 2, "--nproc", nproc, "--fail-at", f"{lost}:5") as cluster:
        cluster.open(7, 14)
        cluster.start(2)
        assert cluster.end() == [0, 0]
        assert f"rank {lost} was killed by SIGKILL" in cluster.read_output()
        assert (
            f"in-place recovery: continuing with {2 * nproc - 1} process" in cluster.read_output()
        )
    ends_well(tmp_path, unbroken)
    audit = audited(tmp_path / RUN_DIR)
    assert (audit["attempts"], audit["superseded"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_a_node_that_joins_costs_no_step(
    in_place: bool, nodes: Any, tmp_path: Path, unbroken: str
) -> None:
    """A second one, and in place a third one: the second has fallen silent, but lives, and comes
    back too late.
    """
    gates = {"GATES": f"{tmp_path} 7 14 17"}
    with nodes("--nodes", "1:2", *(() if in_place else RESTART)) as cluster:
        cluster.start(**gates)
        cluster.wait_at(7)
        second = cluster.start(**gates)
        ready = "are ready: they join after this step" if in_place else "other nodes are waiting"
        wait_until(lambda: ready in cluster.read_output(), cluster.read_output)
        cluster.open(7)
        cluster.wait_at(14)
        if in_place:
            silent = [second.process, *second.process.children(recursive=True)]
            for process in silent:
                process.suspend()
            cluster.open(14)
            cluster.wait_at(17)
            assert "node 1 is lost: the others go on without it" in cluster.read_output()
            cluster.start(**gates)
            wait_until(lambda: cluster.read_output().count(ready) == 2, cluster.read_output)
            for process in silent:
                process.resume()
            wait_until(
                lambda: "continued without it: it joins them again" in second.err.read_text(),
                cluster.read_output,
            )
        cluster.open(14, 17)
        assert cluster.end() == [0] * (2 + in_place), cluster.read_output()
        assert ("generation 1: nodes 2, ranks 2" in cluster.read_output()) != in_place
    result = ends_well(tmp_path, unbroken)
    assert (result["world_size"], result["resumed_from_step"]) == (2, 0 if in_place else 7)
    audit = audited(tmp_path / RUN_DIR)
    assert (audit["attempts"], audit["superseded"]) == (1 if in_place else 2, 0)


@pytest.mark.slow
def test_a_signal_to_one_node_stops_all_with_a_snapshot(
    nodes: Any, tmp_path: Path, unbroken: str
) -> None:
    with nodes("--nodes", 2) as cluster:
        cluster.start(2)
        cluster.wait_at(7)
        next(a for a in cluster.agents if "nodes 2" in a.err.read_text()).process.terminate()
        assert cluster.end() == [75, 75]
    assert (tmp_path / RUN_DIR / "snapshots/step_00000007").is_dir()
    train(GATES, *EXACT, cwd=tmp_path)
    assert ends_well(tmp_path, unbroken)["resumed_from_step"] == 7


@pytest.mark.slow
def test_a_signal_while_nodes_are_missing_ends_the_wait(nodes: Any) -> None:
    with nodes("--nodes", 2) as cluster:
        agent = cluster.start()
        agent.wait_for(cluster.folder / RUN_DIR / "rendezvous.json")
        agent.process.terminate()
        assert cluster.end() == [75]
        assert cluster.read_output() == "stepladder: stopped before its ranks had started\n"


@pytest.mark.slow
def test_a_bug_on_one_node_ends_all(nodes: Any) -> None:
    with nodes("--nodes", 2) as cluster:
        cluster.start(2, RAISES="any 5")
        cluster.open(7, 14)
        assert cluster.end() == [1, 1]
        assert "a bug, not a fault" in cluster.read_output()
        assert "Traceback" in cluster.read_output()
        assert "PeerLost" not in cluster.read_output()


@pytest.mark.slow
def test_a_second_launch_is_refused_and_the_first_one_is_not_disturbed(
    nodes: Any, tmp_path: Path, unbroken: str
) -> None:
    """With a seed of its own at once; with the same command when no node of the first has gone for
    a while.
    """
    with nodes("--nodes", 2, "--explain-after", SECONDS) as cluster:
        cluster.start(2)
        cluster.wait_at(7)
        second = "train", GATES, *EXACT, "--nodes", 2, "--local-addr", "127.0.0.1", "--timeout", 4
        refused(
            run(*second, "--seed", 1, "--fresh", cwd=tmp_path),
            "a launch with another job or settings",
        )
        refused(run(*second, cwd=tmp_path), "in use by a launch that has its 2 nodes")
        cluster.open(7, 14)
        assert cluster.end() == [0, 0]
        assert "other nodes are waiting" not in cluster.read_output()
    ends_well(tmp_path, unbroken)
    assert audited(tmp_path / RUN_DIR)["attempts"] == 1
    assert not (tmp_path / "runs/gates.old-1").exists()


@pytest.mark.slow
def test_fewer_nodes_than_needed_is_said(tmp_path: Path) -> None:
    done = run(
        "train",
        GATES,
        *EXACT,
        "--nodes",
        2,
        "--timeout",
        2,
        "--local-addr",
        "127.0.0.1",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "fewer than 2 nodes came within 2 s" in done.stderr
    assert "Traceback" not in done.stderr


BAD: list[tuple[tuple[object, ...], dict[str, str], str]] = [
    (("--nproc", "3:2"), {}, "--nproc '3:2'"),
    (("--nodes", "0:2"), {}, "--nodes '0:2'"),
    (("--nodes", "two"), {}, "--nodes 'two'"),
    (("--nodes", 2, "--nproc", "1:2"), {}, "only one of them can be a range"),
    (("--nodes", 2), {"RANK": "0"}, "inside a rank"),
    (("--nodes", 2, "--rdzv-endpoint", "nowhere"), {}, "'nowhere' is not HOST:PORT"),
    (
        ("--nodes", 2, "--timeout", 1, "--rdzv-endpoint", "no-name.invalid:1"),
        {},
        "no-name.invalid is not known",
    ),
    (("--nproc", "1:2", "--batch-per-rank", 8), {}, "--batch-per-rank with a number of processes"),
    (("--fail-at", "1"), {}, "--fail-at '1' is not RANK:STEP"),
    (("--timeout", 0), {}, "'--timeout': 0.0 is not in the range"),
    (("--nproc", "1:9"), {}, "9 processes for 8 microbatches"),
]


@pytest.mark.parametrize(("flags", "env", "message"), BAD, ids=[message for *_, message in BAD])
def test_bad_input_is_one_line(
    flags: tuple[object, ...], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    refused(run("train", GATES, *EXACT, *flags, cwd=tmp_path, env=env), message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("of_store", [True, False])
def test_a_launch_that_loses_a_node_keeps_its_directory_from_another(
    of_store: bool, nodes: Any, tmp_path: Path, unbroken: str
) -> None:
    """Two launches race for a directory; one of the first one's nodes is killed, and comes back
    while they ask.
    """
    other = (
        "train",
        GATES,
        *EXACT,
        "--nodes",
        "1:2",
        "--local-addr",
        "127.0.0.1",
        "--timeout",
        SECONDS,
    )
    with nodes("--nodes", "1:2") as cluster:
        cluster.start(2, TOGETHER="2")
        cluster.wait_at(7)
        chosen = cluster.of_store()
        cluster.kill(
            chosen if of_store else next(one for one in cluster.running() if one is not chosen)
        )
        with ExitStack() as stack:
            flags = ("--seed", 1), ("--seed", 2, "--fresh")
            late = [stack.enter_context(started(*other, *more, cwd=tmp_path)) for more in flags]
            cluster.start()
            assert [one.end() for one in late] == [2, 2], cluster.read_output()
            for one in late:
                said = one.err.read_text()
                assert (
                    said.count("error: ") == 1 and "in use by" in said and "Traceback" not in said
                ), said
        cluster.open(7, 14)
        assert sorted(cluster.end()) == [-signal.SIGKILL, 0, 0]
    ends_well(tmp_path, unbroken)
    assert not (tmp_path / "runs/gates.old-1").exists()
