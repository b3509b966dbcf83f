"""What no command can work with: one line that says what was set and what was found, and nothing is
made.

Each was a traceback, was taken for something else, or was found late. `make fuzz` tries more of
each kind.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

from processes import refused, run

pytestmark = pytest.mark.ranks
needs_slurm = pytest.mark.skipif(
    shutil.which("scontrol") is None, reason="no Slurm here: apt-get install slurm-client"
)

RANK = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
JOB = {"SLURM_JOB_ID": "7", "PATH": f"{os.environ['PATH']}:/usr/sbin"}
SCRIPT = ("run", "--run-dir", "new", "--log-dir", "logs")
TRAIN = ("train", "mlp", "--steps", "1", "--run-dir", "new")
ENVIRONMENT: dict[str, tuple[dict[str, str], str]] = {
    "a time limit that is none": ({"STEPLADDER_END_TIME": "soon"}, "STEPLADDER_END_TIME is 'soon'"),
    "digits that are none": ({"STEPLADDER_END_TIME": "²"}, "STEPLADDER_END_TIME"),
    "a job that is not a number": ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x'"),
    "nodes that are no number": (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "9" * 400},
        "SLURM_JOB_NUM_NODES",
    ),
    "processors that are none": (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "٣"},
        "SLURM_JOB_CPUS_PER_NODE",
    ),
    "GPUs that are no number": (
        {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1" * 30},
        "SLURM_GPUS_ON_NODE is",
    ),
}
OF_RANKS: dict[str, tuple[dict[str, str], str]] = {
    "a job where there is no srun": (
        JOB | {"PATH": "/nowhere"},
        "SLURM_JOB_ID=7, but there is no srun here",
    ),
    "a restart that is not a number": ({"SLURM_RESTART_COUNT": "x"}, "SLURM_RESTART_COUNT is 'x'"),
    "a port that torch reads": (
        {
            "PRIMARY_ADDR": "127.0.0.1",
            "PRIMARY_PORT": "29400",
            "NODE_ADDR": "127.0.0.1",
            "NUM_NODES": "2",
        }
        | {"MASTER_PORT": "nan"},
        "MASTER_PORT is 'nan'",
    ),
    "a file for a batch script's ranks, set by hand": (
        RANK | {"STEPLADDER_END_FILE": "word", "WORLD_SIZE": "0"},
        "RANK=0 with WORLD_SIZE=0",
    ),
    "a port that there is none": (RANK | {"MASTER_PORT": "99999999"}, "MASTER_PORT"),
}
FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    "a signal that nobody hears": ((*SCRIPT, "--signals-to-handle", "SIGKILL", "true"), "'SIGKILL' cannot be"),
    "a rendezvous of no kind": ((*SCRIPT, "--rdzv-backend", "zeus", "true"), "'zeus' is not supported: use c10d or static"),
    "a rendezvous over etcd": ((*SCRIPT, "--rdzv-backend", "etcd-v2", "true"), "use c10d or static"),
    "words for numbers": ((*SCRIPT, "--rdzv-conf", "join_timeout=soon", "true"), "join_timeout=soon is not a"),
    "a time without end": ((*SCRIPT, "--rdzv-conf", "read_timeout=inf", "true"), "read_timeout=inf is not a"),
    "a key that is none": ((*SCRIPT, "--rdzv-conf", "x=1", "true"), "'x' is none of"),
    "streams of a rank that there is not": ((*SCRIPT, "--redirects", "9:3", "true"), "--redirects names local"),
    "the same of --tee": ((*SCRIPT, "--tee", "0:1,1:2", "true"), "--tee names local rank 1"),
    "streams of a rank twice": ((*SCRIPT, "--redirects", "0:1,0:2", "true"), "names no streams"),
    "a filter for nobody": ((*SCRIPT, "--local-ranks-filter", "0,5", "true"), "names local rank 5"),
    "a filter of no digits": ((*SCRIPT, "--local-ranks-filter", "²", "true"), "--local-ranks-filter '²'"),
    "a time that is not a number": ((*SCRIPT, "--shutdown-timeout", "nan", "true"), "--shutdown-timeout"),
    "a time below any clock's": ((*SCRIPT, "--timeout", "1e-9", "true"), "--timeout"),
    "a time of other digits": ((*TRAIN, "--explain-after", "٣"), "--explain-after"),
    "a number with an underscore": ((*TRAIN, "--max-restarts", "1_0"), "--max-restarts"),
    "a number of 400 digits": ((*TRAIN, "--max-restarts", "9" * 400), "--max-restarts"),
    "restarts of 30 digits": ((*SCRIPT, "--max-restarts", "9" * 30, "true"), "--max-restarts"),
    "a setting of no number": ((*TRAIN, "--noise", "nan"), "'nan' is not a number"),
    "a setting of other digits": ((*TRAIN, "--hidden", "٣"), "'٣' is not a valid integer"),
    "a setting below its least": ((*TRAIN, "--samples", "-1"), "--samples -1 is not from 1 to 100000000"),
    "too large for memory": ((*TRAIN, "--samples", "1" + "0" * 8, "--features", "100000"), "not enough memory"),
    "a rank that there is not": ((*TRAIN, "--fail-at", "1:1"), "--fail-at 1:1: there is no rank 1"),
    "a job that is a dash": (("train", "-"), "recipe '-' is unknown"),
    "a job behind two dashes": (("train", "--", "--lr"), "recipe '--lr' is unknown"),
    "a text of nothing": (("explain", ""), "no text to explain"),
    "a script to look at that nobody writes": (("doctor", "pipe"), "pipe cannot be read: it is not a file"),
    "a code that no process has": (("note", "256"), "255 is the most"),
    "a path of no name": ((*TRAIN[:-1], ""), "--run-dir '' is not a path"),
    "a path with a line's end": ((*TRAIN[:-1], "a\nb"), "--run-dir 'a\\nb' is not a path"),
    "a path that is no UTF-8": ((*TRAIN[:-1], os.fsdecode(b"\xff\xfe")), "--run-dir '\\udcff"),
    "a path of 300 characters": ((*TRAIN[:-1], "x" * 300), "File name too long"),
    "a path of 2,000 folders": ((*TRAIN[:-1], "x/" * 2000), "--run-dir is a path of 2000 names"),
    "a path in a loop of links": (("audit", "loop"), "RUN_DIR loop: Too many levels of symbolic links"),
    "data of 300 characters": (("data", "info", "x" * 300), "File name too long"),
    "a run of 300 characters": (("watch", "x" * 300), "File name too long"),
    "a job of 300 characters": (("train", "x" * 300 + ".py"), "File name too long"),
    "a batch job of 300 characters": (("submit", "--", "x" * 300), "File name too long"),
    "a script that is a device": ((*SCRIPT, "/dev/full"), "script /dev/full is a device"),
    "a script that nobody writes": ((*SCRIPT, "pipe"), "pipe cannot be read: it is not a file"),
    "a program of no kind": ((*SCRIPT[:1], "./text"), "./text cannot be started: Exec format error"),
    "a script in a loop": ((*SCRIPT, "loop"), "SCRIPT loop: Too many levels of symbolic links"),
}  # fmt: skip


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("echo\n")
    (tmp_path / "text").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "case"),
    [((*SCRIPT, "true"), case) for case in ENVIRONMENT]
    + [(TRAIN, case) for case in ENVIRONMENT | OF_RANKS],
)
def test_an_odd_variable_is_one_line(case: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    env, message = (ENVIRONMENT | OF_RANKS)[case]
    refused(run(*arguments, cwd=tmp_path, env=env), message)
    assert not list(tmp_path.iterdir())


def test_a_network_interface_that_is_not_here_is_said_before_a_run_directory_is_made(
    tmp_path: Path,
) -> None:
    done = run("run", "--run-dir", "new", "true", cwd=tmp_path, env={"GLOO_SOCKET_IFNAME": "none0"})
    refused(done, "GLOO_SOCKET_IFNAME='none0' names no network interface")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", FLAGS)
def test_an_odd_flag_is_one_line(case: str, odd: Path) -> None:
    arguments, message = FLAGS[case]
    done = run(*arguments, cwd=odd)
    line = refused(done, message)
    assert done.stderr == f"{line}\n" and line.isprintable() and len(line) < 1000
    assert sorted(path.name for path in odd.iterdir()) == ["loop", "pipe", "text"]


@needs_slurm
@pytest.mark.parametrize("arguments", [(*SCRIPT, "true"), TRAIN], ids=["run", "train"])
def test_a_slurm_configuration_of_300_characters_is_one_line(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    refused(run(*arguments, cwd=tmp_path, env=JOB | {"SLURM_CONF": "x" * 300}), "SLURM_CONF xxx")
    assert not list(tmp_path.iterdir())


@needs_slurm
@pytest.mark.parametrize("arguments", [(*SCRIPT, "true"), TRAIN], ids=["run", "train"])
def test_a_slurm_job_that_nobody_knows_is_one_line(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    refused(
        run(*arguments, cwd=tmp_path, env=JOB | {"SLURM_CONF": str(tmp_path / "gone")}),
        "SLURM_JOB_ID=7: ",
    )
    assert not list(tmp_path.iterdir())


def test_a_port_that_another_has_is_said_before_a_run_directory_is_made(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        refused(
            run(*SCRIPT, "--master-port", port, "true", cwd=tmp_path),
            f"--master-port {port} is in use",
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_never_come_are_waited_for_as_long_as_was_said(
    rank: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = RANK | {"RANK": rank, "MASTER_PORT": port, "OMP_DYNAMIC": "false"}  # in a new interpreter
    refused(
        run(*TRAIN, "--timeout", "2", cwd=tmp_path, env=env), "not all ranks have joined within 2 s"
    )
    assert not list(tmp_path.iterdir())


def test_a_first_machine_that_has_no_address_is_named(tmp_path: Path) -> None:
    env = RANK | {"MASTER_ADDR": "nowhere.invalid"}
    refused(
        run(*TRAIN, "--timeout", "2", cwd=tmp_path, env=env),
        "the name nowhere.invalid is not known",
    )
    assert not list(tmp_path.iterdir())


JOBS: dict[str, tuple[bytes, str]] = {
    "a zero": (
        b"x = 1\0\n",
        "job.py is not valid Python: source code string cannot contain null bytes",
    ),
    "no text": (b"\xff\xfe", "job.py is not valid Python: "),
    "nested too deeply": (b"x = " + b"-" * 100_000 + b"1", "job.py is not valid Python: "),
}


@pytest.mark.parametrize(
    "arguments", [("train", "job.py"), ("doctor", "job.py"), ("submit", "--", "train", "job.py")]
)
@pytest.mark.parametrize("case", JOBS)
def test_a_file_that_is_no_python_is_one_line(
    case: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    content, message = JOBS[case]
    (tmp_path / "job.py").write_bytes(content)
    refused(run(*arguments, cwd=tmp_path), message)
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


def test_a_terabyte_is_no_job(tmp_path: Path) -> None:
    with (tmp_path / "job.py").open("wb") as file:
        file.truncate(1 << 40)
    of_run = ("run", "--nproc", "2", "job.py"), ("run", "-m", "job")
    for arguments in (
        ("train", "job.py"),
        ("doctor", "job.py"),
        ("submit", "--lint", "job.py"),
        *of_run,
    ):
        refused(run(*arguments, cwd=tmp_path), "it is larger than 16 MiB")


def test_a_line_of_megabytes_is_linted_in_no_time(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH " + "x" * 3_000_000 + "\n")
    assert run("submit", "--lint", "job.sh", cwd=tmp_path, timeout=60).stdout.endswith(" found\n")


def test_a_field_of_another_object_is_no_flag(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("class Config:\n    a.b: int = 1\ndef build(config): ...\n")
    assert "a.b" not in run("train", "job.py", "--help", cwd=tmp_path).stdout


AT_THE_END = """
import threading, time
from contextlib import suppress
from datetime import timedelta
from torch.distributed import DistStoreError, TCPStore
from stepladder.cli import exit_with_error
from stepladder.launcher.nodes.local_node import SELF_MONITOR_THREAD_NAME

class Slow:
    def __del__(self):
        time.sleep(2)

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def ask():
    while True:
        with suppress(DistStoreError):
            store.wait(["never"], timedelta(milliseconds=100))

threading.Thread(target=ask, name=SELF_MONITOR_THREAD_NAME, daemon=True).start()
slow = Slow()
exit_with_error("found. HINT: type", True)
"""


@pytest.mark.slow
def test_a_rank_that_still_asks_the_others_ends_as_all_bad_input(tmp_path: Path) -> None:
    """It aborted: its thread comes back from torch's store when the interpreter has gone."""
    (tmp_path / "s.py").write_text(AT_THE_END)
    env = {"OMP_DYNAMIC": "false", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = run("s.py", cwd=tmp_path, command=(sys.executable,), env=env)
    assert (done.returncode, done.stderr) == (2, "error: found. HINT: type\n")
