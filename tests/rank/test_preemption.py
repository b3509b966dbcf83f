"""The clock of a batch job: a step that could pass its time limit is not begun, on all nodes."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from processes import JOBS, SECONDS, audited, started, train
from ranks import run_ranks
from stepladder.core.errors import InputError
from stepladder.launcher.local.group_spec import read_stop_timeout
from stepladder.rank import preemption
from stepladder.rank.exit_record import END_FILE_VARIABLE
from stepladder.rank.preemption import (
    END_TIME_VARIABLE,
    TIME_LIMIT_MARGIN_S,
    TRAINING_STOP_SIGNALS,
    StopSignals,
    get_seconds_left,
)

GATES = JOBS / "gates.py"


def test_without_a_limit_there_is_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(END_TIME_VARIABLE, "")
    assert get_seconds_left() == math.inf
    assert not StopSignals().is_late(time.perf_counter() + 1e9)


def test_the_longest_step_and_a_last_snapshot_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(END_TIME_VARIABLE, str(int(time.time()) + 1000))
    stop = StopSignals()
    start = time.perf_counter()
    times = [start + seconds for seconds in (1, 41, 51, 900, 905)]
    late = [stop.is_late(now) for now in times]
    assert late == [False, False, False, True, True], "849 seconds were between two questions"
    monkeypatch.setenv(END_TIME_VARIABLE, str(int(time.time()) + 100))
    stop = StopSignals()
    start = time.perf_counter()
    fitting = 100 - TIME_LIMIT_MARGIN_S - 2 * 10
    late = [stop.is_late(start + seconds) for seconds in (fitting - 17, fitting - 7, fitting + 3)]
    assert late == [False, False, True]


@pytest.mark.ranks
@pytest.mark.slow
def test_all_nodes_stop_before_the_limit_and_the_run_goes_on(tmp_path: Path) -> None:
    """Without a signal: a cluster need not warn, and a launcher would take the stop for a node that
    joins.
    """
    arguments = ("train", GATES, "--sync", "exact", "--run-dir", "run", "--snapshot-every", 1000)
    # More than it takes ranks to meet, and less than 20 steps do.
    env = {"SLEEPS": "1.5", "ENDS_IN": "30", END_TIME_VARIABLE: str(int(time.time()) + SECONDS)}
    env |= {
        END_FILE_VARIABLE: f"7:{tmp_path}/run/ended.json",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    with ExitStack() as stack:
        flags = ("--nodes", 2, "--local-addr", "127.0.0.1")
        agents = [
            stack.enter_context(started(*arguments, *flags, cwd=tmp_path, env=env))
            for _ in range(2)
        ]
        assert [agent.end() for agent in agents] == [75, 75]
    record = json.loads((tmp_path / "run" / "ended.json").read_text())
    assert (record["code"], record["late"]) == (75, True) and 0 < record["step"] < 20
    result = train(*arguments[1:], cwd=tmp_path)
    assert (result["resumed_from_step"], result["steps"]) == (record["step"], 20)
    assert audited(tmp_path / "run")["superseded"] == 0


@pytest.mark.parametrize(("has_launcher", "times", "then"), [
    # the launcher hands on what the batch system has sent this rank too
    (True, True, signal.SIG_IGN),
    (True, False, signal.SIG_DFL),
    (False, True, signal.SIG_DFL),
])  # fmt: skip
def test_a_stop_that_is_asked_for_twice_ends_no_rank_that_leaves(
    has_launcher: bool, times: bool, then: signal.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "has_fd_store", lambda: has_launcher)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in TRAINING_STOP_SIGNALS}
    try:
        with StopSignals() as stop:
            if times:
                signal.raise_signal(signal.SIGTERM)
        assert (stop.stop_requested, signal.getsignal(signal.SIGTERM)) == (times, then)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def count_steps_until_stop(comm: object, every: int) -> tuple[int, bool]:
    """The second rank gets the signal in its third step, the first one never."""
    with StopSignals(every) as stop:
        for step in range(1, 20):
            if step == 3 and comm.world.rank == 1:  # type: ignore[attr-defined]
                signal.raise_signal(signal.SIGTERM)
            if stop.agreed():
                return step, stop.stop_requested
    raise AssertionError


@pytest.mark.ranks
@pytest.mark.parametrize(("by_gloo", "every", "step"), [(True, 1, 3), (False, 4, 4)])
def test_all_ranks_stop_in_the_same_step(by_gloo: bool, every: int, step: int) -> None:
    values = run_ranks(count_steps_until_stop, 3, every, by_gloo=by_gloo)
    assert values == [(step, False), (step, True), (step, False)]


def test_a_process_without_a_group_decides_alone() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignals(every=2, signals=[signal.SIGUSR1]) as stop:
        signal.raise_signal(signal.SIGUSR1)
        assert [stop.agreed() for _ in range(4)] == [False, True, True, True]
    assert signal.getsignal(signal.SIGUSR1) == before
    with pytest.raises(InputError, match=r"every=0"):
        StopSignals(every=0)


def test_a_near_time_limit_stops_any_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(END_TIME_VARIABLE, str(int(time.time()) + 1))
    assert StopSignals().agreed()


def test_a_script_that_ends_is_not_ended_by_a_second_signal() -> None:
    handlers = {number: signal.getsignal(number) for number in TRAINING_STOP_SIGNALS}
    try:
        with pytest.raises(SystemExit), StopSignals() as stop:
            signal.raise_signal(signal.SIGTERM)
            if stop.agreed():
                sys.exit(75)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:  # later tests of this process start others, which would ignore what it ignores
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_script_has_what_remains_of_the_time_limit_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read_stop_timeout() == 30
    monkeypatch.setenv(END_TIME_VARIABLE, str(int(time.time()) + 1000))
    assert 900 < read_stop_timeout() <= 1000 - TIME_LIMIT_MARGIN_S
    assert read_stop_timeout(5) == 5
