"""`--hosts` with hundreds of them, with some that never answer, and a launcher that ends while it
asks.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest

from processes import JOBS, SECONDS, refused, run, started, wait_until
from sshds import SSHD, Server, own_address
from stepladder.core.errors import InputError
from stepladder.core.signing import make_secret
from stepladder.launcher import probe
from stepladder.launcher.host import Host, make_environment_script
from stepladder.launcher.ssh import RemoteAgents, raise_file_limit

MANY = 400
# What `--ssh` may be as well: a program that runs the command, here on this machine.
LOCAL = """#!/bin/sh
for word; do [ "$word" = -G ] && echo hostname 10.0.0.1 && exit; done
shift $(($# - 1)); exec sh -c "$1"
"""
PYTHON = """#!/bin/sh
case "$*" in *free_port*) echo PORT=4711;; esac
"""


@pytest.fixture
def limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: None) -> list[Host]:
    for name, text in (("local", LOCAL), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return [Host(f"h{number}", "", (str(tmp_path / "local"),)) for number in range(MANY)]


def test_any_number_of_streams_is_read(limit: None) -> None:
    raise_file_limit(2500)
    pipes = [os.pipe() for _ in range(1100)]
    try:
        assert wait([reader for reader, _ in pipes], 0.0) == []
        os.write(pipes[-1][1], b"x")
        assert wait([reader for reader, _ in pipes], 0.0) == [pipes[-1][0]]
        assert pipes[-1][0] > 1024
    finally:
        for pipe in pipes:
            os.close(pipe[0])
            os.close(pipe[1])


@pytest.mark.slow
def test_a_hundred_are_asked(hosts: list[Host]) -> None:
    assert probe.probe_all(hosts[:100]) == [("10.0.0.1", 4711)] * 100


@pytest.mark.slow
def test_hundreds_run(hosts: list[Host], capfd: pytest.CaptureFixture[str]) -> None:
    raise_file_limit(3 * MANY)
    assert (
        RemoteAgents([(host, ["run"]) for host in hosts], is_fixed=True, raw_stdout=False).run()
        == 0
    )
    assert capfd.readouterr().err == ""


def test_the_secret_of_a_launch_stands_on_no_command_line(
    hosts: list[Host], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "local").write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/typed\nhead -n 1 > {tmp_path}/given\n'
    )
    assert RemoteAgents([(hosts[0], ["run"])], is_fixed=True, raw_stdout=False).run() == 0
    given = (tmp_path / "given").read_text().strip()
    assert len(given) == len(make_secret())
    assert given not in (tmp_path / "typed").read_text() and given not in "".join(
        capfd.readouterr()
    )


def test_hosts_get_no_secret_of_the_environment_on_a_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_DEBUG", "TORCH_HUB_PAT", "NCCL_API_KEY"):
        monkeypatch.setenv(name, "value")
    sent = make_environment_script()
    assert "NCCL_DEBUG=value" in sent and "HUB_PAT" not in sent and "API_KEY" not in sent


@pytest.mark.skipif(
    shutil.which("ssh") is None, reason="no ssh here: apt-get install openssh-client"
)
def test_a_limit_that_is_too_low_is_said_before(tmp_path: Path) -> None:
    names = ",".join(f"h{number}" for number in range(MANY))
    command = "bash", "-c", 'ulimit -n 1024; exec "$@"', "bash", sys.executable, "-m", "stepladder"
    done = run("run", "--hosts", names, JOBS / "script.py", cwd=tmp_path, command=command)
    refused(done, "open files, and the limit is 1024", "ulimit -n 13")  # 1300, and those open now


@pytest.fixture
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A machine that takes the key, and then never does what it is asked."""
    address = own_address()
    folder = tmp_path_factory.mktemp("sshd")
    if SSHD is None or address is None:
        pytest.skip("no sshd, or no address but loopback")
    Path("/run/sshd").mkdir(exist_ok=True)
    server = Server(folder, address)
    with (folder / "config").open("a") as config:
        # Like `sleep`, but it ends with the session: sshd leaves a command alone once the client is gone.
        config.write("ForceCommand tail --pid=$PPID -f /dev/null\n")
    with server.running():
        yield server


def clients(server: Server) -> list[psutil.Process]:
    """Processes of ssh that are connected there."""
    open_files = []
    ports = {*map(str, server.ports)}
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "ssh" and ports & {*(process.info["cmdline"] or ())}:
            open_files.append(process)
    return open_files


def commands(server: Server) -> list[str]:
    """Names of what runs below the server."""
    open_files = []
    for process in server.sessions():
        with suppress(psutil.NoSuchProcess):
            open_files.append(process.name())
    return open_files


@pytest.mark.filterwarnings("error")  # of pipes that outlive their loop
def test_a_host_that_never_answers_is_one_line(
    hanging: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_TIMEOUT_S", 3.0)
    hosts = Host.parse_list(",".join(hanging.hosts), hanging.ssh)
    with pytest.raises(
        InputError, match=f"host {hanging.address}:\\d+ has not answered within 3 s"
    ):
        probe.probe_all(hosts)
    assert not clients(hanging)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        (signal.SIGKILL, -9),
    ],
)
def test_a_launcher_that_ends_while_it_asks_leaves_no_ssh(
    number: signal.Signals, code: int, hanging: Server, tmp_path: Path
) -> None:
    flags = "--hosts", ",".join(hanging.hosts), "--ssh", hanging.ssh
    with started("run", *flags, JOBS / "script.py", cwd=tmp_path) as running:
        wait_until(lambda: commands(hanging).count("tail") == 3)
        running.process.send_signal(number)
        assert running.popen.wait(SECONDS) == code
        wait_until(lambda: not clients(hanging))
