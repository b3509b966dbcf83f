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
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.local.monitor import POLLS_UNTIL_REPORTED, Limits, Monitor
from stepladder.launcher.local.observed_ranks import ObservedRanks
from stepladder.launcher.local.process_stats import read_busy_seconds, read_cpu_seconds, sleeps
from stepladder.rank.progress import (
    AWAITED,
    COLLECTIVE,
    COMPUTING,
    GROUP,
    NUM_SLOTS,
    PASS,
    PHASE,
    STARTING,
)


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def make_ranks(folder: Path, numbers: list[int], pids: list[int]) -> ObservedRanks:
    ranks = ObservedRanks(numbers, folder / "progress")
    for local_rank, pid in enumerate(pids):
        ranks.set_process(local_rank, pid)
    return ranks


@pytest.fixture
def ranks(tmp_path: Path, sleeper: int) -> ObservedRanks:
    """Ranks 4 and 5 of a second node: this process, and one that sleeps."""
    return make_ranks(tmp_path, [4, 5], [os.getpid(), sleeper])


@pytest.fixture
def monitor(ranks: ObservedRanks) -> Monitor:
    return Monitor(ranks, Limits(2.0))


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def progress_slots(ranks: ObservedRanks, local_rank: int) -> Any:
    """A rank's progress slots, as the rank has them."""
    slots = memoryview(mapped(ranks.progress_file)).cast("q")
    return slots[local_rank * NUM_SLOTS : (local_rank + 1) * NUM_SLOTS]


def mapped(file: Path) -> mmap.mmap:
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), 0)


def poll_until_text(monitor: Monitor, polls: int = 50) -> str:
    for _ in range(polls):
        if text := monitor.poll([0, 1]):
            return text
    raise AssertionError("there was no text")


def test_what_does_not_move_is_explained_once_and_its_going_on_is_told(
    ranks: ObservedRanks,
) -> None:
    monitor = Monitor(ranks, Limits(2.0, explain_after=1.0))
    progress_slots(ranks, 0)[PHASE] = progress_slots(ranks, 1)[PHASE] = COMPUTING
    assert monitor.poll([0, 1]) is None
    text = poll_until_text(monitor)
    assert text.startswith("stepladder: nothing has moved for 1 s: ")
    assert [monitor.poll([0, 1]) for _ in range(3)] == [None] * 3
    progress_slots(ranks, 0)[PASS] += 1
    assert "the ranks continue, after" in str(monitor.poll([0, 1]))
    assert monitor.explanation is None


def test_the_rank_that_is_behind_is_blamed_for_the_timeout(
    monitor: Monitor, ranks: ObservedRanks, sleeper: int
) -> None:
    progress_slots(ranks, 0)[COLLECTIVE] = progress_slots(ranks, 0)[AWAITED] = 7
    progress_slots(ranks, 1)[COLLECTIVE] = 6
    explanation = explain_hang(ranks.inspect([0, 1]))
    assert explanation.rank == 5
    assert f"rank 5 (pid {sleeper}) has not reached collective 7" in explanation.sentence


def test_a_hang_is_explained_while_a_rank_joins(tmp_path: Path, sleeper: int) -> None:
    """The rank that joins is in no group yet, and no rank waits for it."""
    ranks = make_ranks(tmp_path, [2, 1], [sleeper, sleeper])
    progress_slots(ranks, 0)[PHASE] = STARTING
    slots = progress_slots(ranks, 1)
    slots[PHASE] = COMPUTING
    slots[COLLECTIVE] = slots[AWAITED] = 7
    slots[GROUP] = 1
    text = poll_until_text(Monitor(ranks, Limits(2.0, explain_after=1.0)))
    assert f"rank 1 (pid {sleeper}) waits in collective 7" in text


def test_a_group_that_stands_still_ends_after_the_timeout_but_not_while_it_starts(
    monitor: Monitor, ranks: ObservedRanks
) -> None:
    for phase, overdue in ((STARTING, False), (COMPUTING, True)):
        progress_slots(ranks, 0)[PHASE] = progress_slots(ranks, 1)[PHASE] = phase
        # 8 seconds in polls; the timeout is 2, and ranks have 5 more to say it themselves.
        for _ in range(40):
            monitor.poll([0, 1])
        assert monitor.overdue is overdue


def test_a_rank_without_words_moves_while_it_computes(tmp_path: Path, sleeper: int) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    ranks = make_ranks(tmp_path, [0, 1], [busy.pid, sleeper])
    monitor = Monitor(ranks, Limits(100.0, explain_after=3.0))
    try:
        max_polls = 0
        for _ in range(5):  # not in all of them, but where this process gets no core for a while
            monitor.poll([0, 1])
            max_polls = max(max_polls, monitor.polls_without_progress)
        spent = read_cpu_seconds(busy.pid)
        wait_until(lambda: read_cpu_seconds(busy.pid) > spent + 1.5)
        monitor.poll([0, 1])
        assert max_polls > 0
        assert monitor.polls_without_progress == 0
    finally:
        busy.kill()
        busy.wait()
    assert "nothing has moved" in poll_until_text(monitor)


def test_a_stopped_rank_is_named_once_and_overdue_in_time(
    ranks: ObservedRanks, sleeper: int
) -> None:
    stop(sleeper)
    monitor = Monitor(ranks, Limits(2.0, explain_after=100.0))
    lines = [monitor.poll([0, 1]) for _ in range(10)]
    assert [line is not None for line in lines] == [
        n + 1 == POLLS_UNTIL_REPORTED for n in range(10)
    ]
    assert f"rank 5 (pid {sleeper}) is stopped (SIGSTOP)" in str(lines[POLLS_UNTIL_REPORTED - 1])
    assert monitor.overdue
    explanation = explain_hang(ranks.inspect([0, 1]))
    assert explanation.rank == 5 and explanation.sentence.startswith(
        f"rank 5 (pid {sleeper}) is stopped (SIGSTOP)"
    )


def test_one_that_goes_on_in_time_is_forgiven(monitor: Monitor, sleeper: int) -> None:
    stop(sleeper)
    for _ in range(9):
        monitor.poll([0, 1])
    os.kill(sleeper, signal.SIGCONT)
    wait_until(lambda: psutil.Process(sleeper).status() != psutil.STATUS_STOPPED)
    monitor.poll([0, 1])
    assert not monitor.overdue


def test_a_process_that_waits_for_a_core_is_not_idle(sleeper: int) -> None:
    wait_until(lambda: sleeps(sleeper))
    before = read_busy_seconds(sleeper)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as worker:
        wait_until(lambda: read_busy_seconds(worker.pid) > 0.2)
        assert not sleeps(worker.pid)
        worker.kill()
    assert read_busy_seconds(sleeper) == before
