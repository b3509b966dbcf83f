"""Ranks that Slurm or torchrun has started have no launcher: each looks at itself, one says who is
missing.
"""

from __future__ import annotations

import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore

from processes import JOBS, run, started, wait_until
from stepladder.core.address import find_free_port
from stepladder.core.world import World
from stepladder.launcher.nodes.self_monitor import SelfMonitor
from stepladder.launcher.nodes.signed_board import SignedBoard
from tasks import RANKS, said_by, tasks

pytestmark = pytest.mark.ranks

PLACES = {
    "busy": r" in step 10: it is in compute_metric\(\), keeps_waiting.py:\d+ .*; the others wait in backward",
    "gil": r": it is in match_pattern\(\), keeps_waiting.py:\d+ .*; the others wait in backward",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["busy", "gil"])
def test_one_rank_of_a_script_says_for_all_who_keeps_them_waiting(
    kind: str, tmp_path: Path
) -> None:
    named = (
        r"^stepladder: other ranks have waited for \d+ s: rank 1 \(pid \d+ on \S+\)" + PLACES[kind]
    )
    with tasks(tmp_path, "run", "--explain-after", 2, JOBS / "keeps_waiting.py", kind) as ranks:
        wait_until(lambda: re.search(named, said_by(ranks), re.MULTILINE), lambda: said_by(ranks))
        assert len(re.findall(named, said_by(ranks), re.MULTILINE)) == 1


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rank_that_goes_on_says_no_more_that_it_has_waited(
    goes_on: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = SelfMonitor(World(rank=0, world_size=2), 2.0, -1)
    watch.meter.poll(watch.pid)
    ranks_here = watch._inspect_ranks()
    watch.meter.context_switches = (-2, -2) if goes_on else watch._reported_switches
    watch._print_explanation(SignedBoard(HashStore(), "watch", ""), [*ranks_here])
    assert ("other ranks have waited" in capsys.readouterr().err) == (not goes_on)


@pytest.mark.slow
def test_a_rank_that_left_is_named_once_and_not_the_lost_connection(tmp_path: Path) -> None:
    with tasks(tmp_path, "run", JOBS / "keeps_waiting.py", "return") as ranks:
        codes = [
            rank.end() for rank in ranks
        ]  # -6 where gloo's threads abort a process that ends by an error
        assert codes.count(0) == 1 and set(codes) <= {0, 1, -signal.SIGABRT}, said_by(ranks)
    message = r"^stepladder: rank 1 ended well \(exit code 0\) after 10 steps; rank \d .* was in step 11, in backward"
    assert len(re.findall(message, said_by(ranks), re.MULTILINE)) == 1, said_by(ranks)
    assert "Traceback" not in said_by(ranks)


@pytest.mark.slow
def test_a_rank_that_exits_is_not_aborted_by_its_monitors_thread(tmp_path: Path) -> None:
    """Python unwinds a daemon thread that returns from compiled code then: C++ calls abort()."""
    endpoint = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    script = JOBS / "exits_while_monitored.py"
    done = run(script, cwd=tmp_path, env=endpoint, command=(sys.executable,))
    assert done.returncode == 0, done.stderr


def test_an_error_of_the_script_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import sys\nprint(sys.argv, __name__)\nraise KeyError('mine')\n"
    )
    with tasks(tmp_path, "run", "fails.py", "--x") as ranks:
        assert {rank.end() for rank in ranks} == {1}
    assert ranks[1].out.read_text() == "['fails.py', '--x'] __main__\n"
    first, *_, last = ranks[1].err.read_text().splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "KeyError: 'mine'")
    assert "stepladder" not in ranks[1].err.read_text().replace(str(tmp_path), "")


@pytest.mark.slow
def test_one_rank_of_a_job_says_it_for_all(tmp_path: Path) -> None:
    named = r"^stepladder: other ranks have waited for \d+ s: rank 1 .* it is in validate\(\), hangs.py:\d+"
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "WORLD_SIZE": str(RANKS),
    }
    arguments = "train", JOBS / "hangs.py", "--explain-after", 2
    with ExitStack() as stack:
        torchruns = (
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "HANG": "sleep 3"} for rank in range(RANKS)
        )
        ranks = [
            stack.enter_context(started(*arguments, cwd=tmp_path, env=variables | rank_variables))
            for rank_variables in torchruns
        ]
        wait_until(lambda: re.search(named, said_by(ranks), re.MULTILINE), lambda: said_by(ranks))
        assert len(re.findall(named, said_by(ranks), re.MULTILINE)) == 1
