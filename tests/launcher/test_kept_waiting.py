"""One rank keeps the others waiting, or has left them: real ranks of a script, and the line that
names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from processes import JOBS, Started, run, started, wait_until
from stepladder.core.address import find_free_port, is_listening

pytestmark = pytest.mark.ranks

SCRIPT = JOBS / "keeps_waiting.py"
WAITED = r"^stepladder: (other ranks have waited|nothing has moved) for \d+ s: rank 1 \(pid \d+\)"
BACKWARD = "the others wait in backward, called by train()"
PLACES = {
    "busy": rf" in step 10: it is in compute_metric\(\), keeps_waiting.py:\d+ .*; "
    rf"{re.escape(BACKWARD)}",
    "gil": rf" in step 10: it is in match_pattern\(\), keeps_waiting.py:\d+ .*; "
    rf"{re.escape(BACKWARD)}",
    "file": rf" in step 10: it is in write_file\(\), keeps_waiting.py:\d+ .*; "
    rf"{re.escape(BACKWARD)}",
    "child": rf" in step 10: it is in count_lines\(\), keeps_waiting.py:\d+ .*; "
    rf"{re.escape(BACKWARD)}",
    "early": r": it is in compute_metric\(\), keeps_waiting.py:\d+ .*; the others wait in "
    r"init_process_group",
}
LEFT = (
    r"rank 1 \(pid \d+\) ended well \(exit code 0\) after 10 steps; rank 0 \(pid \d+\) "
    r"(is|was) in step 11,"
    r" in backward, called by train\(\), keeps_waiting.py:\d+"
)
SLOW = pytest.mark.slow


def wait_for_text(running: Started, pattern: str) -> None:
    """Wait until a line of standard error matches."""
    wanted = re.compile(pattern, re.MULTILINE)
    wait_until(lambda: wanted.search(running.err.read_text()), running.err.read_text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
def test_a_rank_that_is_elsewhere_is_named_while_the_others_wait(kind: str, tmp_path: Path) -> None:
    with started("run", "--nproc", 3, "--explain-after", 2, SCRIPT, kind, cwd=tmp_path) as running:
        wait_for_text(running, WAITED + PLACES[kind])


@pytest.mark.slow
def test_a_rank_that_is_an_interpreter_of_its_own_is_named_too(tmp_path: Path) -> None:
    command = "run", "--nproc", 2, "--start-method", "spawn", "--explain-after", 2, SCRIPT, "busy"
    with started(
        *command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}
    ) as running:  # without py-spy
        wait_for_text(running, WAITED + PLACES["busy"])


@pytest.mark.slow
def test_it_is_said_once_and_the_error_of_that_rank_comes_first(tmp_path: Path) -> None:
    flags = "--nproc", 2, "--explain-after", 1
    with started("run", *flags, SCRIPT, "raise", cwd=tmp_path) as running:
        wait_for_text(running, WAITED + " in step")
        (tmp_path / "said").touch()
        assert running.end() == 1
        said = running.err.read_text()
    lines = [match.string[match.end() :] for match in re.finditer(WAITED, said, re.MULTILINE)]
    facts = [text.partition("\n")[0] for text in lines]
    assert len(facts) == len(set(facts)), said
    assert len([fact for fact in facts if fact.startswith(" in step")]) == 1, said
    assert "stepladder: rank 1 failed: ValueError: the metric has no meaning\n" in said


@pytest.mark.slow
def test_a_rank_that_comes_back_ends_nothing(tmp_path: Path) -> None:
    flags = "--nproc", 2, "--explain-after", 1
    with started("run", *flags, SCRIPT, "back", cwd=tmp_path) as running:
        wait_for_text(running, WAITED + " in step 10: it is in come_back")
        (tmp_path / "said").touch()
        wait_for_text(running, r"^stepladder: the ranks continue, after \d+ s$")
        (tmp_path / "said-again").touch()
        assert running.end() == 0, running.err.read_text()


@pytest.mark.slow
def test_a_rank_that_is_elsewhere_is_ended_where_that_was_asked_for(tmp_path: Path) -> None:
    done = run("run", "--nproc", 2, "--end-after", 4, SCRIPT, "busy", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(
        r"^stepladder: rank 1 .*: it is in compute_metric", done.stderr, re.MULTILINE
    ), done.stderr


# Rank 0 waits nearly all the time, for longer than it takes to be explained, but in ever new
# collectives: one for each 0.1 s of processor time, of which a busy machine gives little.
SLOW_EVERYWHERE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
end, left = time.monotonic() + 8, 1.0
while left > 0:
    until = time.thread_time() + 0.1 * dist.get_rank()
    while time.thread_time() < until:
        pass
    common = torch.tensor(end - time.monotonic())
    dist.all_reduce(common, dist.ReduceOp.MIN)
    left = common.item()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_wait_for_a_slow_one_in_each_step_are_no_hang(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_EVERYWHERE)
    done = run("run", "--nproc", 2, "--explain-after", 4, "slow.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # On a busy machine one may come to the group seconds after the other, which is a wait like any.
    assert not re.search("others wait in (?!init_process_group)", done.stderr), done.stderr


@pytest.mark.parametrize(
    "kind", ["return", *(pytest.param(k, marks=SLOW) for k in ("exit", "os-exit", "swallowed"))]
)
def test_a_rank_that_left_early_is_named_instead_of_a_lost_connection(
    kind: str, tmp_path: Path
) -> None:
    done = run("run", "--nproc", 3, SCRIPT, kind, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(
        f"^stepladder: {LEFT}. Usual cause: fewer batches", done.stderr, re.MULTILINE
    ), done.stderr
    assert "drop_last=True" in done.stderr and "Traceback" not in done.stderr
    assert "a collective that only the others call, as under `if rank == 0:`" in done.stderr


@pytest.mark.slow
def test_a_rank_that_left_is_named_also_where_the_others_wait_for_ever(tmp_path: Path) -> None:
    exchange = "--exchange", "gloo"  # in shared memory the others are told at once
    done = run("run", "--nproc", 3, *exchange, "--end-after", 4, SCRIPT, "open", cwd=tmp_path)
    assert done.returncode == 1
    # the second where all were found at rest at once
    waits = "(other ranks have waited|nothing has moved) for"
    assert re.search(rf"^stepladder: {waits} \d+ s: {LEFT}$", done.stderr, re.MULTILINE), (
        done.stderr
    )
    assert "usual cause: fewer batches than the others have" in done.stderr


@contextmanager
def two_nodes(
    kind: str, folder: Path, addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.1")
) -> Iterator[list[Started]]:
    """A launcher for each, with one rank. The first one has the store, the lower address rank 0."""
    port = find_free_port()
    with ExitStack() as stack:
        nodes = []
        for address in addresses:
            pattern = "--nodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", address
            nodes += [
                stack.enter_context(
                    started("run", *pattern, "--explain-after", 2, SCRIPT, kind, cwd=folder)
                )
            ]
            wait_until(lambda: is_listening("127.0.0.1", port), nodes[0].err.read_text)
        yield nodes


def said_by(nodes: list[Started]) -> str:
    return "".join(node.err.read_text() for node in nodes)


@pytest.mark.slow
def test_one_launcher_says_for_all_nodes_whose_rank_keeps_them_waiting(tmp_path: Path) -> None:
    pattern = (
        r"stepladder: other ranks have waited for \d+ s: rank 1 \(pid \d+ on \S+\)" + PLACES["busy"]
    )
    with two_nodes("busy", tmp_path) as nodes:
        wait_until(lambda: re.search(pattern, said_by(nodes)), lambda: said_by(nodes))
    assert len(re.findall(pattern, said_by(nodes))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
def test_one_launcher_says_for_all_nodes_which_rank_has_left(
    addresses: tuple[str, str], tmp_path: Path
) -> None:
    with two_nodes("return", tmp_path, addresses) as nodes:
        wait_until(
            lambda: all(node.popen.poll() is not None for node in nodes), lambda: said_by(nodes)
        )
    assert re.search(LEFT.replace(r"\d+\)", r"\d+ on \S+\)"), said_by(nodes)), said_by(nodes)
    assert said_by(nodes).count("ended well") == 1 and "Traceback" not in said_by(nodes)
