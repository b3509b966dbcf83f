"""docs/preemption.md: the scripts of docs/any-loop.md are asked to stop, and lose nothing."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from test_any_loop import BEFORE, SCRIPTS, SPARE_EPOCHS, command

from pages import EXAMPLES
from processes import audited, run, started, wait_until

# A new interpreter, whose ranks are its children: what tests fork has them elsewhere.
COLD = {"PYTHONHASHSEED": "0"}


def list_ranks(launcher: int) -> list[psutil.Process]:
    """The processes that the launcher's fork server has started, but for the one that guards them."""
    servers = psutil.Process(launcher).children()
    forks = [process for server in servers for process in server.children()]
    return [fork for fork in forks if fork.num_threads() > 1]


def send_signal(ranks: list[psutil.Process]) -> list[psutil.Process]:
    """Send SIGTERM to the ranks, and return those that still run."""
    running = [rank for rank in ranks if rank.is_running() and rank.status() != "zombie"]
    for rank in running:
        with suppress(psutil.NoSuchProcess):
            rank.terminate()
    return running


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_is_asked_to_stop_loses_no_step(name: str, tmp_path: Path) -> None:
    package, checkpoint = SCRIPTS[name]
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for file in (f"{name}.py", *BEFORE):
        shutil.copy(EXAMPLES / file, tmp_path)
    ledger = tmp_path / "runs" / name / "ledger" / "attempt-0001.rank-0.jsonl"
    with started(*command(name, 2, SPARE_EPOCHS), cwd=tmp_path, env=COLD) as stopped:
        wait_until(lambda: any(tmp_path.glob(checkpoint)) or stopped.popen.poll() is not None)
        ranks = list_ranks(stopped.popen.pid)
        assert len(ranks) == 2, ranks
        os.kill(stopped.popen.pid, signal.SIGTERM)
        # Slurm sends it to each rank too, and not at the same time.
        wait_until(lambda: not send_signal(ranks))
        assert stopped.end() == 75, stopped.err.read_text()
    epochs = 3 + ledger.read_text().count("\n") // 23
    done = run(*command(name, 3, epochs), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = audited(tmp_path / "runs" / name)
    assert result["ok"] and (result["attempts"], result["superseded"]) == (2, 0), result
