"""Scripts whose ranks hang, through `run`: what is said as soon as no rank can go on; and two that
are only slow, of which nothing is said.
"""

from __future__ import annotations

import re
from pathlib import Path
from threading import Timer

import pytest

from hang_kinds import SAID_BY_GLOO, SAID_IN_MEMORY, SCRIPT, serve_gate
from processes import run, started, wait_until

pytestmark = pytest.mark.ranks
SAID = {"memory": SAID_IN_MEMORY, "gloo": SAID_BY_GLOO}
CASES = [(exchange, kind) for exchange, kinds in SAID.items() for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "kind"), CASES)
def test_a_hang_is_explained_without_a_flag(exchange: str, kind: str, tmp_path: Path) -> None:
    flags = "--nproc", 2, "--exchange", exchange, "--max-restarts", 0
    explained = re.compile(rf"^stepladder: .*{SAID[exchange][kind]}", re.MULTILINE)
    with started("run", *flags, SCRIPT, kind, cwd=tmp_path) as running:
        wait_until(lambda: explained.search(running.err.read_text()), running.err.read_text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["download", "evaluate"])
def test_of_a_rank_that_is_only_slow_nothing_is_said(kind: str, tmp_path: Path) -> None:
    with serve_gate() as (port, is_open):
        timer = Timer(9, is_open.set)  # nothing is said, so that there is nothing to wait for
        timer.start()
        done = run("run", "--nproc", 2, "--max-restarts", 0, SCRIPT, kind, port, cwd=tmp_path)
        timer.join()
    assert done.returncode == 0, done.stderr
    assert "usual cause" not in done.stderr
