"""What a launcher sees of its ranks: whether anything moves, and processes that are stopped."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from processes import wait_until
from stepladder.launcher.local.monitor import LOOKS_UNTIL_NAMED, Limits, Monitor
from stepladder.launcher.local.rest import cpu_seconds
from stepladder.rank.progress import COMPUTING, COUNT, PASS, PHASE, STARTING, WAITS, WORDS


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def monitor(tmp_path: Path, sleeper: int) -> Monitor:
    """Ranks 4 and 5 of a second node: this process, and one that sleeps."""
    monitor = Monitor(tmp_path / "progress", [4, 5], Limits(2.0))
    monitor.pids = [os.getpid(), sleeper]
    return monitor


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def words(monitor: Monitor, local_rank: int) -> Any:
    """A rank's words, as it has them."""
    return memoryview(mapped(monitor.words.path)).cast("q")[
        local_rank * WORDS : (local_rank + 1) * WORDS
    ]


def mapped(file: Path) -> mmap.mmap:
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), 0)


def look_until_said(monitor: Monitor, looks: int = 50) -> str:
    for _ in range(looks):
        if said := monitor.look([0, 1]):
            return said
    raise AssertionError("nothing was said")


def test_what_does_not_move_is_explained_once_and_its_going_on_is_told(monitor: Monitor) -> None:
    monitor.explain_after = 1.0
    words(monitor, 0)[PHASE] = words(monitor, 1)[PHASE] = COMPUTING
    assert monitor.look([0, 1]) is None
    said = look_until_said(monitor)
    assert said.startswith("stepladder: nothing has moved for 1 s: ")
    assert [monitor.look([0, 1]) for _ in range(3)] == [None] * 3
    words(monitor, 0)[PASS] += 1
    assert "the ranks go on, after" in str(monitor.look([0, 1]))
    assert monitor.explanation is None


def test_the_rank_that_is_behind_is_blamed_for_the_timeout(monitor: Monitor, sleeper: int) -> None:
    words(monitor, 0)[COUNT] = words(monitor, 0)[WAITS] = 7
    words(monitor, 1)[COUNT] = 6
    found = monitor.explain([0, 1])
    assert found.rank == 5
    assert f"rank 5 (pid {sleeper}) has not reached collective 7" in found.sentence


def test_a_group_that_stands_still_ends_after_the_timeout_but_not_while_it_starts(
    monitor: Monitor,
) -> None:
    for phase, overdue in ((STARTING, False), (COMPUTING, True)):
        words(monitor, 0)[PHASE] = words(monitor, 1)[PHASE] = phase
        for _ in range(
            40
        ):  # 8 seconds in looks; the timeout is 2, and ranks have 5 more to say it themselves
            monitor.look([0, 1])
        assert monitor.overdue is overdue


def test_a_rank_without_words_moves_while_it_computes(tmp_path: Path, sleeper: int) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    monitor = Monitor(tmp_path / "progress", [0, 1], Limits(100.0, explain_after=3.0))
    monitor.pids = [busy.pid, sleeper]
    try:
        still = 0
        for _ in range(5):  # not in all of them, but where this process gets no core for a while
            monitor.look([0, 1])
            still = max(still, monitor.still)
        spent = cpu_seconds(busy.pid)
        wait_until(lambda: cpu_seconds(busy.pid) > spent + 1.5)
        monitor.look([0, 1])
        assert (still > 0, monitor.still) == (True, 0)
    finally:
        busy.kill()
        busy.wait()
    assert "nothing has moved" in look_until_said(monitor)


def test_a_stopped_rank_is_named_once_and_overdue_in_time(monitor: Monitor, sleeper: int) -> None:
    stop(sleeper)
    monitor.explain_after = 100.0
    lines = [monitor.look([0, 1]) for _ in range(10)]
    assert [line is not None for line in lines] == [n + 1 == LOOKS_UNTIL_NAMED for n in range(10)]
    assert f"rank 5 (pid {sleeper}) is stopped (SIGSTOP)" in str(lines[LOOKS_UNTIL_NAMED - 1])
    assert monitor.overdue
    found = monitor.explain([0, 1])
    assert found.rank == 5 and found.sentence.startswith(
        f"rank 5 (pid {sleeper}) is stopped (SIGSTOP)"
    )


def test_one_that_goes_on_in_time_is_forgiven(monitor: Monitor, sleeper: int) -> None:
    stop(sleeper)
    for _ in range(9):
        monitor.look([0, 1])
    os.kill(sleeper, signal.SIGCONT)
    wait_until(lambda: psutil.Process(sleeper).status() != psutil.STATUS_STOPPED)
    monitor.look([0, 1])
    assert not monitor.overdue
