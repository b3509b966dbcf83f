"""`--hosts` over real SSH: an sshd of our own is the other machines."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from processes import JOBS, SECONDS, audited, refused, run, started, wait_until
from sshds import Server, private_sshd
from stepladder.core.address import find_free_port
from stepladder.core.errors import InputError
from stepladder.launcher.host import Host
from stepladder.launcher.probe import find_private_address
from stepladder.launcher.ssh import RemoteAgents, remove_flag

SCRIPT = JOBS / "script.py"
PLAIN = JOBS / "plain.py"
AGENTS = 2


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with private_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def flags(server: Server) -> Iterator[tuple[object, ...]]:
    """Two hosts, and how to reach them. At the test's end nothing of it runs there."""
    yield "--hosts", ",".join(server.hosts[:AGENTS]), "--ssh", server.ssh
    wait_until(lambda: not server.sessions(), lambda: f"still there: {server.sessions()}")


@pytest.mark.ranks
def test_a_script_runs_on_all_hosts_with_our_folder_and_environment(
    flags: tuple[object, ...], server: Server, tmp_path: Path
) -> None:
    (tmp_path / "my script.py").write_text(SCRIPT.read_text())
    done = run(
        "run",
        *flags,
        "--nproc",
        2,
        "my script.py",
        "about",
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "3"},
    )
    assert done.returncode == 0, done.stderr
    prefixes = {f"[{server.address}:{port}] [rank " for port in server.ports[:AGENTS]}
    width = len(prefixes.copy().pop())
    lines = [line for line in done.stdout.splitlines() if "{" in line]
    assert {line[:width] for line in lines} == prefixes
    found = {int(line[width]): json.loads(line[line.index("{") :]) for line in lines}
    assert {(found[r]["WORLD_SIZE"], found[r]["OMP_NUM_THREADS"]) for r in range(4)} == {("4", "3")}
    assert {found[rank]["MASTER_ADDR"] for rank in range(4)} == {server.address}
    assert found[0]["argv"] == ["my script.py", "about"] and found[0]["path"] == str(tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
def test_hosts_of_one_machine_meet_at_its_loopback_address_if_asked(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    with private_sshd(tmp_path_factory.mktemp("sshd"), "127.0.0.1") as server:
        flags = "--hosts", ",".join(server.hosts[:AGENTS]), "--ssh", server.ssh, "--nproc", 1
        refused(run("run", *flags, SCRIPT, cwd=tmp_path), "--local-addr 127.0.0.1 with all nodes")
        done = run("run", *flags, "--local-addr", "127.0.0.1", SCRIPT, "about", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not server.sessions(), lambda: f"still there: {server.sessions()}")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_job_of_grid_engine_runs_on_the_hosts_of_its_file(server: Server, tmp_path: Path) -> None:
    lines = [f"{host} 1 all.q@{host} UNDEFINED\n" for host in server.hosts[:AGENTS]]
    (tmp_path / "pe_hostfile").write_text("".join(lines))
    env = {"PE_HOSTFILE": str(tmp_path / "pe_hostfile"), "NHOSTS": str(AGENTS)}
    flags = "--ssh", server.ssh, "--sync", "exact", "--global-batch", 4, "--json"
    done = run("train", PLAIN, *flags, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == AGENTS
    assert "stepladder: 2 nodes (PE_HOSTFILE, slots: " in done.stderr
    wait_until(lambda: not server.sessions(), lambda: f"still there: {server.sessions()}")


@pytest.mark.ranks
@pytest.mark.slow
def test_train_on_two_hosts_has_one_result_on_stdout(
    flags: tuple[object, ...], tmp_path: Path
) -> None:
    done = run(
        "train", PLAIN, *flags, "--sync", "exact", "--global-batch", 4, "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["world_size"] == 2
    alone = run(
        "train",
        PLAIN,
        "--sync",
        "exact",
        "--global-batch",
        4,
        "--run-dir",
        "alone",
        "--json",
        cwd=tmp_path,
    )
    assert json.loads(alone.stdout)["weights_sha256"] == result["weights_sha256"]
    assert audited(tmp_path / "runs/plain")["ok"]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_failure_on_one_host_ends_all(flags: tuple[object, ...], tmp_path: Path) -> None:
    done = run("run", *flags, SCRIPT, "raise", 1, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("rank 1 failed: ValueError: trouble") == 1
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_the_launcher_ends_the_hosts_do(
    number: signal.Signals, flags: tuple[object, ...], server: Server, tmp_path: Path
) -> None:
    """Asked to stop, the ranks end as they wish (75); killed, nobody is left to ask."""
    with started("run", *flags, SCRIPT, "resume", tmp_path / "held", cwd=tmp_path) as running:
        for rank in range(AGENTS):
            running.wait_for(tmp_path / f"held.{rank}")
        pids = [
            int(pid)
            for rank in range(AGENTS)
            for pid in (tmp_path / f"held.{rank}").read_text().split()
        ]
        running.process.send_signal(number)
        assert running.popen.wait(SECONDS) == (75 if number == signal.SIGINT else -signal.SIGKILL)
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.mark.ranks
def test_a_host_that_cannot_be_used_is_one_line_and_nothing_is_started(
    server: Server, tmp_path: Path
) -> None:
    both = ",".join(server.hosts[:2])
    elsewhere = f"{server.address}:{find_free_port()}"
    (tmp_path / "here only").mkdir()
    cases = [
        (both, server.with_key("wrong"), "refuses the SSH key"),
        (both, server.with_key("key", known="nothing"), "its SSH host key is not known here"),
        (f"{server.host},{elsewhere}", server.ssh, f"host {elsewhere} cannot be reached"),
        (
            f"{server.host},no-such-host.invalid",
            server.ssh,
            "host no-such-host.invalid cannot be reached",
        ),
        (both, "no-such-ssh", "--hosts needs no-such-ssh"),
    ]
    for hosts, ssh, found in cases:
        line = refused(
            run("run", "--hosts", hosts, "--ssh", ssh, SCRIPT, "about", cwd=tmp_path), found
        )
        assert "ssh" in line.partition("HINT: ")[2]
    fewer = run("run", "--nodes", 3, "--hosts", both, "--ssh", server.ssh, SCRIPT, cwd=tmp_path)
    refused(fewer, "--nodes 3 with 2 hosts")


@pytest.mark.parametrize("text", ["a,b,a", "me@a,you@a", "a:22,b,a:22"])
def test_a_host_that_is_named_twice_is_refused(text: str) -> None:
    """Both agents were started, and waited for each other without a word."""
    with pytest.raises(
        InputError, match=r"--hosts names a(:22)? twice\. HINT: --hosts .*--nproc N"
    ):
        Host.parse_list(text, "ssh")


def test_what_a_probe_found_is_said() -> None:
    host = Host("me@far", "2222")
    assert "has no folder" in str(host.explain_failure(41, ""))
    assert "has no stepladder" in str(host.explain_failure(42, ""))
    changed = host.explain_failure(
        255, "@ REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."
    )
    assert "its SSH host key has changed" in str(changed)
    silent = host.explain_failure(255, "ssh: connect to host far port 2222: Connection timed out")
    assert str(silent).endswith("Connection timed out). HINT: ssh -p 2222 me@far true")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", "")]),
        ("a,me@b-1.net,root@c:2222", [("a", ""), ("me@b-1.net", ""), ("root@c", "2222")]),
        (
            "10.0.0.1:22,fd00::2,me@[fd00::2]:22",
            [("10.0.0.1", "22"), ("fd00::2", ""), ("me@fd00::2", "22")],
        ),
    ],
)
def test_hosts_are_read(text: str, hosts: list[tuple[str, str]]) -> None:
    assert [(host.target, host.port) for host in Host.parse_list(text, "ssh")] == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "-oProxyCommand=x", "a b", "a;b", "a:port", "a@"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a host"):
        Host.parse_list(text, "ssh")


def test_other_hosts_get_the_same_arguments() -> None:
    assert remove_flag(["run", "--hosts", "a,b", "x.py", "--hosts", "c"], "--hosts") == [
        "run",
        "x.py",
        "--hosts",
        "c",
    ]
    assert remove_flag(["run", "--hosts=a,b", "x.py"], "--hosts") == ["run", "x.py"]


def test_a_rented_machine_has_an_address_among_its_own() -> None:
    assert find_private_address({"NODE_ADDR": "10.65.0.2", "RUNPOD_POD_ID": "x"}) == "10.65.0.2"
    assert find_private_address({"RUNPOD_POD_ID": "x1y2"}) == "x1y2.runpod.internal"
    assert find_private_address({"PORT": "1"}) == ""


@pytest.mark.parametrize(
    ("codes", "fixed", "code"),
    [
        ((0, 0), True, 0),
        ((0, 75), True, 75),
        ((0, 1), True, 1),
        ((1, 2), True, 2),
        ((75, 255), True, 1),
        ((0, 255), False, 0),
        ((75, 255), False, 75),
        ((1, 255), False, 1),
    ],
)
def test_hosts_that_were_lost_decide_nothing_where_the_others_go_on(
    codes: tuple[int, int], fixed: bool, code: int
) -> None:
    agents = RemoteAgents([], fixed, raw_stdout=False)
    agents.processes = {
        f"host {n}": subprocess.Popen(["sh", "-c", f"exit {c}"]) for n, c in enumerate(codes)
    }
    for process in agents.processes.values():
        process.wait()
    assert agents._find_exit_code() == code
