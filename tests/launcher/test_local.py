"""Ranks under a launcher: what is left after a kill, what is restarted, and what a person reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from psutil import CONN_LISTEN, Process

from processes import JOBS, SECONDS, Started, audited, refused, run, started, train, wait_until
from stepladder.core.address import find_free_port
from stepladder.core.console import print_message
from stepladder.storage.lock import is_locked, read_owner

pytestmark = pytest.mark.ranks

TROUBLE = JOBS / "trouble.py"
OFTEN = "--snapshot-every", "2"
NPROC = "--nproc", "2"
RESTART = "--on-loss", "restart"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the same job when nothing goes wrong."""
    return train(TROUBLE, *NPROC, cwd=tmp_path_factory.mktemp("unbroken"))


@pytest.fixture
def temporary(short_folder: Path) -> Path:
    """Where the command's temporary files go."""
    return short_folder


def left_in(temporary: Path) -> list[str]:
    """All but torch's own cache."""
    return [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.fixture
def paused(tmp_path: Path, temporary: Path) -> Iterator[Started]:
    """A run on two ranks that stands still in step 7, with a snapshot of step 6."""
    marker = tmp_path / "marker"
    env = {"TROUBLE": f"hold 1 7 {marker}", "TMPDIR": str(temporary)}
    with started("train", TROUBLE, *NPROC, *OFTEN, *RESTART, cwd=tmp_path, env=env) as running:
        running.wait_for(marker)
        wait_until((tmp_path / "runs/trouble/snapshots/step_00000006").exists)
        yield running


def ends_as_unbroken(
    tmp_path: Path, unbroken: dict[str, Any], resumed_from: int | None = None
) -> None:
    result = train(TROUBLE, *NPROC, cwd=tmp_path)
    assert result["weights_sha256"] == unbroken["weights_sha256"]
    assert result["metrics"] == unbroken["metrics"]
    assert resumed_from is None or result["resumed_from_step"] == resumed_from
    assert audited(tmp_path / "runs/trouble")["ok"]


def kill_launcher(running: Started) -> None:
    running.process.kill()


def kill_group(running: Started) -> None:
    running.signal_group(signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_launcher, kill_group])
def test_kill_9_leaves_no_rank_alive_and_the_run_resumes(
    kill: Callable[[Started], None], paused: Started, tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    assert len(paused.family) >= 4  # launcher, server, two ranks
    kill(paused)
    assert paused.end() == -signal.SIGKILL
    ends_as_unbroken(tmp_path, unbroken, resumed_from=6)


def test_a_stopped_fork_server_is_named_and_goes_on(paused: Started, tmp_path: Path) -> None:
    """While it stood, no rank could be started, and none was seen to end."""
    rank = psutil.Process(int((tmp_path / "marker").read_text()))
    server = rank.parent()
    server.suspend()
    wait_until(
        lambda: "was stopped (SIGSTOP), and is continued" in paused.err.read_text(),
        paused.err.read_text,
    )
    assert f"the process that ranks are forked from (pid {server.pid})" in paused.err.read_text()
    rank.kill()
    assert paused.end() == 0


def test_nobody_on_the_network_reaches_a_run_on_one_machine(paused: Started) -> None:
    listening = [
        connection
        for process in paused.family
        for connection in process.net_connections()
        if connection.status == CONN_LISTEN
    ]
    assert listening  # the store, and each rank's gloo
    assert all(ip_address(connection.laddr.ip).is_loopback for connection in listening), listening


def test_a_killed_rank_is_restarted_and_the_run_ends_as_unbroken(
    paused: Started, tmp_path: Path, temporary: Path, unbroken: dict[str, Any]
) -> None:
    os.kill(int((tmp_path / "marker").read_text()), signal.SIGKILL)
    assert paused.end() == 0
    assert "rank 1 was killed by SIGKILL" in paused.err.read_text()
    ends_as_unbroken(tmp_path, unbroken, resumed_from=6)  # prints the stored result
    assert not left_in(temporary)


@pytest.mark.slow
def test_nobody_gets_the_directory_between_the_end_of_rank_0_and_its_next_start(
    tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    marker = tmp_path / "marker"
    run_dir = tmp_path / "runs/trouble"
    env = {"TROUBLE": f"hold 0 7 {marker}"}
    with started("train", TROUBLE, *NPROC, *RESTART, *OFTEN, cwd=tmp_path, env=env) as running:
        running.wait_for(marker)
        before = read_owner(run_dir)
        os.kill(int(marker.read_text()), signal.SIGKILL)
        while (
            read_owner(run_dir).get("token") == before["token"]
        ):  # until the next rank 0 has taken it over
            has_writer = is_locked(run_dir)
            assert (
                has_writer or read_owner(run_dir).get("token") != before["token"]
            )  # it may even have ended meanwhile
        assert running.end() == 0
    assert not is_locked(run_dir)
    ends_as_unbroken(tmp_path, unbroken)


@pytest.mark.slow
def test_fresh_stays_fresh_where_a_rank_is_lost_before_it_has_begun(
    tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    train(TROUBLE, *NPROC, "--steps", 3, cwd=tmp_path)
    env = {"TROUBLE": f"die 0 0 {tmp_path / 'marker'}"}
    done = run("train", TROUBLE, *NPROC, "--fresh", cwd=tmp_path, env=env)
    assert done.returncode == 0 and "rank 0 was killed by SIGKILL" in done.stderr, done.stderr
    assert (tmp_path / "runs/trouble.old-1/config.json").exists()
    ends_as_unbroken(tmp_path, unbroken, resumed_from=0)


@pytest.mark.slow
def test_where_the_process_is_killed_that_ranks_are_forked_from_there_is_a_new_one(
    tmp_path: Path,
) -> None:
    def servers() -> list[Process]:
        return [
            child
            for child in Process(process.pid).children()
            if "forkserver" in " ".join(child.cmdline())
        ]

    command = [sys.executable, "-m", "stepladder", "train", TROUBLE, *NPROC]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        wait_until(servers)
        servers()[0].kill()  # while it imports torch
        assert process.wait(SECONDS) == 0


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_closed_terminal_stops_a_run_with_a_snapshot(
    tmp_path: Path, unbroken: dict[str, Any], nproc: int
) -> None:
    marker, (ours, theirs) = tmp_path / "marker", os.openpty()
    env = {**os.environ, "TROUBLE": f"hold 0 7 {marker}"}
    command = [sys.executable, "-m", "stepladder", "train", TROUBLE, "--nproc", str(nproc), *OFTEN]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, preexec_fn=lambda: os.login_tty(theirs)
    ) as process:
        os.close(theirs)
        wait_until(lambda: marker.exists() or process.poll() is not None)
        os.close(ours)  # as when the window is closed, or the connection is lost
        assert process.wait(SECONDS) == 75
    assert train(TROUBLE, "--nproc", nproc, cwd=tmp_path)["resumed_from_step"] == 7


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-m", "stepladder", "train", TROUBLE]
    env = {**os.environ, "TROUBLE": "hangup 0 7"}
    done = subprocess.run(command, cwd=tmp_path, env=env, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert train(TROUBLE, cwd=tmp_path)["steps"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_take_nothing_from_the_files_that_are_opened_next(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    command = [
        sys.executable,
        "-m",
        "stepladder",
        "train",
        "mlp",
        "--steps",
        "3",
        "--run-dir",
        "run",
    ]
    assert subprocess.run(command, cwd=tmp_path, preexec_fn=close, check=False).returncode == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 3
    assert read_owner(tmp_path / "run")["attempt"] == 1


@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGTERM, False),
        (signal.SIGINT, True),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_with_a_snapshot_and_the_run_resumes(
    number: int,
    to_all: bool,
    paused: Started,
    tmp_path: Path,
    temporary: Path,
    unbroken: dict[str, Any],
) -> None:
    """To the launcher as `kill` does; to all processes as a terminal, `timeout` and Slurm do."""
    (paused.signal_group if to_all else paused.process.send_signal)(number)
    assert paused.end() == 75
    assert (tmp_path / "runs/trouble/snapshots/step_00000007").is_dir()
    assert "Traceback" not in paused.err.read_text()
    assert not left_in(temporary)
    ends_as_unbroken(tmp_path, unbroken, resumed_from=7)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_to_all_processes_stops_well_with_data_loading_workers(
    nproc: int, tmp_path: Path
) -> None:
    command = ("train", JOBS / "augmented.py", "--workers", 2, "--nproc", nproc, "--epochs", 10**6)
    with started(*command, cwd=tmp_path) as running:
        running.wait_for(tmp_path / "runs/augmented/metrics.jsonl")
        running.signal_group(signal.SIGTERM)
        assert running.end() == 75, running.err.read_text()


def test_kill_9_of_the_launcher_leaves_no_data_loading_worker_alive(tmp_path: Path) -> None:
    with started(
        "train", JOBS / "augmented.py", "--workers", 1, *NPROC, "--epochs", 10**6, cwd=tmp_path
    ) as running:
        running.wait_for(tmp_path / "runs/augmented/metrics.jsonl")
        assert len(running.family) >= 6  # launcher, server, two ranks, a worker each
        kill_launcher(running)
        running.end()


def test_asked_to_stop_before_the_first_step_it_ends_at_once(
    tmp_path: Path, temporary: Path
) -> None:
    marker = tmp_path / "marker"
    with started(
        "train",
        TROUBLE,
        *NPROC,
        cwd=tmp_path,
        env={"TROUBLE": f"hold 1 0 {marker}", "TMPDIR": str(temporary)},
    ) as running:
        running.wait_for(marker)
        running.process.terminate()
        assert running.end() == 75
    assert not left_in(temporary)


def test_ctrl_c_before_the_first_step_is_one_line(tmp_path: Path, temporary: Path) -> None:
    marker = tmp_path / "marker"
    env = {"TROUBLE": f"hold 1 0 {marker}", "TMPDIR": str(temporary)}
    with started("train", TROUBLE, *NPROC, cwd=tmp_path, env=env) as running:
        running.wait_for(marker)
        running.signal_group(signal.SIGINT)
        assert running.end() == 130
    assert running.err.read_text() == "\nstopped\n"
    assert not left_in(temporary)


def test_a_start_after_one_that_saved_nothing_says_so(tmp_path: Path) -> None:
    run("train", "mlp", "--steps", 3, "--fail-at", "0:2", "--on-loss", "stop", cwd=tmp_path)
    done = run("train", "mlp", "--steps", 3, cwd=tmp_path)
    assert "run directory runs/mlp, begun again: the earlier start had saved nothing" in done.stderr


def has_fork_server(launcher: Process) -> bool:
    with suppress(psutil.Error):  # another child has ended this moment
        return any("forkserver" in " ".join(child.cmdline()) for child in launcher.children())
    return False


def test_ctrl_c_while_the_fork_server_imports_torch_is_one_line(tmp_path: Path) -> None:
    """It goes to all processes, as a terminal sends it."""
    command = [sys.executable, "-m", "stepladder", "train", "mlp", *NPROC]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        wait_until(lambda: has_fork_server(Process(launcher.pid)))
        os.killpg(launcher.pid, signal.SIGINT)
        _, error = launcher.communicate(timeout=SECONDS)
    assert (launcher.returncode, error) == (130, "\nstopped\n")


def shown_once(error: str, text: str) -> None:
    lines = error.splitlines()
    assert sum("Traceback" in line for line in lines) == 1
    assert [line for line in lines if line.startswith("  [rank ") and text in line] == [
        f"  [rank 1] {text}"
    ]


def test_an_exception_at_one_step_twice_ends_the_run_and_is_shown_once_with_its_rank(
    tmp_path: Path, temporary: Path
) -> None:
    env = {"TROUBLE": "raise 1 7", "TMPDIR": str(temporary)}
    done = run("train", TROUBLE, *NPROC, *RESTART, *OFTEN, cwd=tmp_path, env=env)
    assert done.returncode == 1
    shown_once(done.stderr, "RuntimeError: trouble at step 7")
    assert "rank 1 failed at step 7" in done.stderr
    assert "a bug, not a fault" in done.stderr
    assert not left_in(temporary)


def test_an_exception_that_does_not_come_back_is_recovered_from(
    tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    env = {"TROUBLE": f"assert 1 7 {tmp_path / 'marker'}"}
    done = run("train", TROUBLE, *NPROC, *RESTART, *OFTEN, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    shown_once(done.stderr, "AssertionError")
    ends_as_unbroken(tmp_path, unbroken)  # prints the stored result


def test_memory_that_a_rank_does_not_get_is_named_and_recovered_from(tmp_path: Path) -> None:
    done = run(
        "train", TROUBLE, *NPROC, cwd=tmp_path, env={"TROUBLE": f"memory 1 7 {tmp_path / 'marker'}"}
    )
    assert done.returncode == 0, done.stderr
    assert "cause: out of memory. HINT: a smaller --microbatch" in done.stderr
    assert "in-place recovery: continuing with 1 process" in done.stderr
    assert audited(tmp_path / "runs/trouble")["ok"]


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group whose processes may have 64 MB in all."""
    group = Path(f"/sys/fs/cgroup/memory/stepladder-test-{os.getpid()}")
    limits = {"memory.limit_in_bytes": 64 << 20, "memory.swappiness": 0}
    if not group.parent.exists():
        group = Path(f"/sys/fs/cgroup/stepladder-test-{os.getpid()}")
        limits = {"memory.max": 64 << 20, "memory.swap.max": 0}
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        for name, value in limits.items():
            (group / name).write_text(str(value))
    except OSError as error:
        group.rmdir()
        pytest.skip(f"no control group limits memory here: {error}")
    yield group
    group.rmdir()


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_for_its_memory_is_replaced_and_the_cause_is_named(
    memory_group: Path, tmp_path: Path
) -> None:
    env = {"TROUBLE": f"kernel-memory 1 7 {tmp_path / 'marker'}", "MEMORY_GROUP": str(memory_group)}
    done = run("train", TROUBLE, *NPROC, *OFTEN, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "cause: out of memory, so the kernel ended it" in done.stderr
    assert "in-place recovery: continuing with 1 process" in done.stderr
    assert audited(tmp_path / "runs/trouble")["ok"]


def test_a_crash_outside_of_a_collective_is_named_and_recovered_from(
    tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    env = {"TROUBLE": f"abort 1 7 {tmp_path / 'marker'}"}
    done = run("train", TROUBLE, *NPROC, *RESTART, *OFTEN, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed by SIGABRT" in done.stderr
    ends_as_unbroken(tmp_path, unbroken)  # prints the stored result


def test_a_job_that_ends_itself_is_not_restarted(tmp_path: Path) -> None:
    done = run("train", TROUBLE, *NPROC, *OFTEN, cwd=tmp_path, env={"TROUBLE": "leave 1 7"})
    assert done.returncode == 1
    lines = (
        "stepladder: rank 1 ended with exit code 3\nstepladder: not restarted: the job "
        "has ended itself"
    )
    assert lines in done.stderr and "restarting" not in done.stderr, done.stderr


def test_an_exception_before_the_first_step_is_not_restarted(tmp_path: Path) -> None:
    done = run("train", TROUBLE, *NPROC, cwd=tmp_path, env={"TROUBLE": "raise 1 0"})
    assert done.returncode == 1
    shown_once(done.stderr, "RuntimeError: trouble at step 0")
    assert "restarting" not in done.stderr


def test_bad_input_found_on_any_rank_is_one_line(tmp_path: Path) -> None:
    refused(
        run("train", TROUBLE, *NPROC, cwd=tmp_path, env={"TROUBLE": "bad_input 1 0"}),
        "the job found bad input",
    )
    assert not (tmp_path / "runs").exists()


def test_after_max_restarts_it_gives_up(tmp_path: Path) -> None:
    env = {"TROUBLE": "die 1 3"}
    done = run("train", TROUBLE, *NPROC, *RESTART, "--max-restarts", 1, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert done.stderr.count("rank 1 was killed by SIGKILL") == 2
    assert "given up after 1 restarts" in done.stderr


def test_what_other_ranks_print_is_kept_in_the_run_directory(tmp_path: Path) -> None:
    """Also what they printed before a resume."""
    for steps, printing in ((4, 3), (10, 6)):
        command = ("train", TROUBLE, *NPROC, "--steps", steps)
        done = run(*command, cwd=tmp_path, env={"TROUBLE": f"print 1 {printing}"})
        assert done.returncode == 0, done.stderr
        assert "here at step" not in done.stdout + done.stderr
    logs = sorted((tmp_path / "runs/trouble/log").iterdir())
    assert [log.name for log in logs] == ["attempt-0.rank-1.log"]
    lines = [
        line for line in logs[0].read_text().splitlines() if not line.startswith("[W")
    ]  # torch's warnings
    assert lines == ["here at step 3", "here at step 6"]


def test_what_other_ranks_print_can_be_followed_and_outlives_the_launcher(tmp_path: Path) -> None:
    log = tmp_path / "runs/trouble/log/attempt-0.rank-1.log"
    env = {"TROUBLE": f"print-and-hold 1 7 {tmp_path / 'marker'}"}
    with started("train", TROUBLE, *NPROC, cwd=tmp_path, env=env) as running:
        wait_until(lambda: log.exists() and "here at step 7\n" in log.read_text())
        running.record_family()
        kill_launcher(running)
        running.end()
    assert "here at step 7\n" in log.read_text()


@pytest.mark.slow
def test_ranks_that_do_not_come_to_a_steps_end_are_ended_and_it_is_said(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    env = {"TROUBLE": f"deaf 1 7 {marker}"}
    with started("train", TROUBLE, "--nproc", 2, cwd=tmp_path, env=env) as running:
        running.wait_for(marker)
        running.process.terminate()
        assert running.end() == 1
    assert (
        "asked to stop, the ranks did not reach the end of a step in time"
        in running.err.read_text()
    )


def test_what_is_said_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else other processes' lines come in between, where Python writes unbuffered."""
    written: list[str] = []
    monkeypatch.setattr(
        sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None, closed=False)
    )
    print_message("a rank was lost")
    assert written == ["stepladder: a rank was lost\n"]


def test_the_ranks_port_is_none_that_linux_gives_away() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(find_free_port() for _ in range(20)) < max(first, 32000)
