"""Any script under `run`, unmodified: what it sees, what is said of its failures, and what is left
after them.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from gloo import gloo_comes_last
from processes import JOBS, Started, is_alive, refused, run, started, wait_until
from stepladder.core.address import find_free_port
from stepladder.core.process_count import count_cores
from stepladder.launcher.local.output import Output
from stepladder.rank.exit_record import END_FILE_VARIABLE

pytestmark = pytest.mark.ranks

SCRIPT = JOBS / "script.py"
TUTORIAL = JOBS / "tutorial.py"
NPROC = "--nproc", 2


@pytest.fixture
def env(short_folder: Path) -> Iterator[dict[str, str]]:
    """What the command's environment is, beside ours; nothing is left of its temporary files."""
    yield {"TMPDIR": str(short_folder)}
    left = [
        path.name for path in short_folder.iterdir() if not path.name.startswith("torchinductor_")
    ]
    assert not left


def lines_of(text: str, rank: int) -> list[str]:
    return [
        line.removeprefix(f"[rank {rank}] ")
        for line in text.splitlines()
        if line.startswith(f"[rank {rank}] ")
    ]


LISTENERS = """\
import os, psutil, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
sockets = psutil.Process().net_connections("inet")
print([one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN])
dist.barrier()
"""


@pytest.mark.parametrize("master", ["", "MASTER_ADDR=localhost"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_no_other_machine_reaches_the_ranks_of_one(
    nproc: int, master: str, tmp_path: Path, env: dict[str, str]
) -> None:
    chosen = f'import os; os.environ |= {{"MASTER_ADDR": "localhost", "MASTER_PORT": "{find_free_port()}"}}\n'
    (tmp_path / "script.py").write_text((chosen if master else "") + LISTENERS)
    done = run("run", "--nproc", nproc, "script.py", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    (shown,) = [line for line in done.stdout.splitlines() if "[rank 1]" not in line]
    assert set(ast.literal_eval(shown.removeprefix("[rank 0] "))) == {
        "127.0.0.1"
    }  # the store, and gloo


BATCH_NORM = """\
import os, torch, torch.distributed as dist
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(6, 3), torch.randn(6, 2)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if size > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
for _ in range(3):
    loss = nn.functional.mse_loss(model(x[rank::size]), y[rank::size])
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
state = torch.cat([tensor.flatten().float() for tensor in model.state_dict().values()])
print([round(value, 4) for value in state.tolist()])
"""


def test_batch_norm_of_cpu_ranks_is_that_of_the_whole_batch(
    tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(BATCH_NORM)
    alone = run("run", "--nproc", 1, "script.py", cwd=tmp_path, env=env)
    together = run("run", *NPROC, "script.py", cwd=tmp_path, env=env)
    assert "SyncBatchNorm works on CPUs here" in together.stderr
    expected = alone.stdout.strip()
    assert expected.count(",") > 20, alone.stderr
    assert [lines_of(together.stdout, rank) for rank in (0, 1)] == [[expected]] * 2, together.stderr


# -- what the script sees --------------------------------------------------------------------------


def test_a_tutorial_s_script_runs_as_under_torchrun(tmp_path: Path, env: dict[str, str]) -> None:
    flags = "--standalone", "--nnodes=1", "--nproc_per_node", 2
    done = run("run", *flags, TUTORIAL, 2, 1, "--batch_size", 128, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert lines_of(done.stdout, rank) == [
            f"[GPU{rank}] Epoch {epoch} | Batchsize: 128 | Steps: 8" for epoch in (0, 1)
        ]
    assert (tmp_path / "snapshot.pt").is_file()


@pytest.mark.parametrize(
    "how",
    [
        (),
        pytest.param(("--start-method", "spawn"), marks=pytest.mark.slow),
        pytest.param(("-m",), marks=pytest.mark.slow),
    ],
    ids=["forked", "spawned", "module"],
)
def test_the_script_is_main_and_knows_who_it_is(
    how: tuple[str, ...], tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "asked.py").write_text(SCRIPT.read_text())
    name = "asked" if "-m" in how else "asked.py"
    done = run("run", *NPROC, *how, name, "about", cwd=tmp_path, env=env | {"OMP_NUM_THREADS": ""})
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stdout, 1)
    message = json.loads(lines[0])
    assert lines[1:] == ["at exit"]
    assert lines_of(done.stderr, 1) == ["to stderr"]
    assert message.pop("known") and message.pop("argv")[1:] == ["about"]
    assert (message.pop("path"), message.pop("process")) == (str(tmp_path), "MainProcess")
    assert message == {
        "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "ROLE_NAME": "default",
        "OMP_NUM_THREADS": "", "PYTHONUNBUFFERED": "1", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


IN_BACKWARD = """
import torch

x = torch.ones(1, requires_grad=True)
x.register_hook(lambda _: print("given" if torch._C._is_key_in_tls("context") else "nothing"))
x.sum().backward()
"""


def test_gloo_s_threads_get_no_python_object_which_a_freed_model_would_wait_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "backward.py").write_text(IN_BACKWARD)
    if run("backward.py", cwd=tmp_path, command=(sys.executable,)).stdout != "given\n":
        pytest.skip("this torch gives none, so `keep_backward_context_from_gloo` can go")
    assert run("run", "backward.py", cwd=tmp_path).stdout == "nothing\n"


ENDED_BY_FREEING = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist

def gloo_is_behind():  # the test has found its threads
    names = Path("/proc/self/task").glob("*/comm")
    found = [int(name.parent.name) for name in names if "gloo" in name.read_text()]
    return len(found) > 1 and all(os.sched_getscheduler(thread) == os.SCHED_IDLE for thread in found)

def main():
    dist.init_process_group()
    while not gloo_is_behind():
        time.sleep(0.001)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    for _ in range(3):
        loss = model(torch.ones(720, 64)).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach() / 2)
    dist.barrier()
    dist.destroy_process_group()

main()  # frees the model, and with it the threads of its group
"""


@pytest.mark.ranks
def test_a_model_is_freed_while_gloo_still_works(tmp_path: Path) -> None:
    (tmp_path / "freed.py").write_text(ENDED_BY_FREEING)
    with gloo_comes_last():
        assert run("run", *NPROC, "freed.py", cwd=tmp_path).returncode == 0


def test_threads_are_the_cores_shared_out(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = (
        "env",
        "-i",
        *(f"{key}={value}" for key, value in environment.items()),
        sys.executable,
        "-m",
        "stepladder",
    )
    done = run("run", *NPROC, SCRIPT, "about", cwd=tmp_path, command=command)
    assert json.loads(lines_of(done.stdout, 0)[0])["OMP_NUM_THREADS"] == str(
        max(1, count_cores() // 2)
    )


def test_one_process_writes_to_our_own_streams(tmp_path: Path) -> None:
    done = run("run", SCRIPT, "about", cwd=tmp_path)
    assert json.loads(done.stdout.splitlines()[0])["WORLD_SIZE"] == "1"
    assert done.stderr == "to stderr\n"


def test_what_is_no_python_is_executed(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho $RANK of $WORLD_SIZE: $1\n")
    program.chmod(0o755)
    for command in (("./program",), ("--no-python", "./program")):
        done = run("run", *NPROC, *command, "x", cwd=tmp_path)
        assert lines_of(done.stdout, 1) == ["1 of 2: x"], done.stderr
    assert lines_of(run("run", *NPROC, "echo", "-n", "y", cwd=tmp_path).stdout, 0) == ["y"]


def test_each_rank_has_a_log_and_what_is_shown_can_be_chosen(tmp_path: Path) -> None:
    flags = "--log-dir", "logs", "--redirects", "3", "--tee", "0:1", "--local-ranks-filter", "0"
    done = run("run", *NPROC, *flags, SCRIPT, "about", cwd=tmp_path)
    assert [line[:9] for line in done.stdout.splitlines()] == ["[rank 0] ", "[rank 0] "]
    assert done.stderr == ""
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["attempt-0.rank-0.log", "attempt-0.rank-1.log"]
    assert all("at exit\n" in text and "to stderr\n" in text for text in logs.values())


def test_a_log_has_whole_lines_of_both_streams(tmp_path: Path) -> None:
    output = Output(prefixed=False, log_dir=tmp_path, shown=lambda *_: False)
    with output.open_pipes("rank-0", 0, 0) as pipes:
        for stream, text in (
            (0, b"half a"),
            (1, b"one\n"),
            (0, b" line\nno end"),
        ):  # `print` under -u writes twice
            os.write(pipes[stream].number, text)
            output.drain()
    output.drain()
    assert (tmp_path / "rank-0.log").read_text() == "one\nhalf a line\nno end\n"


# -- failures --------------------------------------------------------------------------------------

CAUSES = [
    (("raise", 1), "rank 1 failed: ValueError: trouble", ""),
    (("raise", 1, "memory"), "rank 1 failed: MemoryError", "cause: out of memory. HINT: "),
    (("raise", 0, "import"), "rank 0 failed: ModuleNotFoundError", "cause: an import. HINT: "),
    (("exit", 1, 3), "rank 1 ended with exit code 3", ""),
    (("exit", 1, "a word"), "rank 1 ended with exit code 1", "[rank 1] a word"),
    (("kill", 1, "marker"), "rank 1 was killed by SIGKILL", "cause: `kill -9` from outside"),
]


@pytest.mark.parametrize(
    ("args", "message", "cause"), CAUSES, ids=[message for _, message, _ in CAUSES]
)
def test_the_first_failure_is_shown_once_with_its_rank_and_cause(
    args: tuple[object, ...], message: str, cause: str, tmp_path: Path, env: dict[str, str]
) -> None:
    word = tmp_path / "ended.json"
    of_job = {END_FILE_VARIABLE: f"7:{word}", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    done = run("run", *NPROC, SCRIPT, *args, cwd=tmp_path, env=env | of_job)
    assert done.returncode == 1
    assert json.loads(word.read_text())["code"] == (137 if args[0] == "kill" else 1)
    assert f"stepladder: {message}" in done.stderr
    assert cause in done.stderr
    assert done.stderr.count("Traceback") == (args[0] == "raise")
    assert "site-packages" not in done.stderr and "runpy" not in done.stderr


def test_another_rank_s_broken_connection_is_not_taken_for_the_cause(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "try:\n"
        "    if dist.get_rank() == 1:\n"
        "        raise KeyError('the cause')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "finally:\n"
        "    dist.destroy_process_group()\n"
    )
    done = run("run", *NPROC, "two.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 1 failed: KeyError: 'the cause'" in done.stderr
    assert done.stderr.count("Traceback") == 1


def test_a_lost_rank_restarts_all_as_often_as_asked(tmp_path: Path, env: dict[str, str]) -> None:
    once = run(
        "run", *NPROC, "--max_restarts=1", SCRIPT, "kill", 1, "marker", cwd=tmp_path, env=env
    )
    assert once.returncode == 0, once.stderr
    assert "restarting all ranks (1 of 1 restarts)" in once.stderr
    always = run("run", *NPROC, "--max-restarts", 1, SCRIPT, "raise", 1, cwd=tmp_path, env=env)
    assert always.returncode == 1
    assert always.stderr.count("rank 1 failed") == 2 and always.stderr.count("Traceback") == 1
    assert "given up after 1 restarts. HINT: --max-restarts 2" in always.stderr


def test_a_rank_that_fails_again_and_again_is_left_out(tmp_path: Path) -> None:
    done = run("run", "--nproc", "1:2", SCRIPT, "exit", 1, 4, cwd=tmp_path)
    assert "rank 1 failed twice within a minute: continuing with 1 ranks" in done.stderr


# -- signals ---------------------------------------------------------------------------------------


@contextmanager
def held(word: str, folder: Path, env: dict[str, str]) -> Iterator[Started]:
    """A run on two ranks that wait for a signal, each with a child of its own."""
    with started("run", *NPROC, SCRIPT, word, folder / "held", cwd=folder, env=env) as running:
        for rank in (0, 1):
            running.wait_for(folder / f"held.{rank}")
        running.family |= {
            psutil.Process(int(pid))
            for r in (0, 1)
            for pid in (folder / f"held.{r}").read_text().split()
        }
        yield running


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_signal_reaches_the_ranks_and_75_comes_back(
    number: signal.Signals, tmp_path: Path, env: dict[str, str]
) -> None:
    with held("resume", tmp_path, env) as running:
        running.process.send_signal(signal.SIGUSR1)  # a warning: it ends nothing
        wait_until(lambda: all((tmp_path / f"held.{rank}.warned").exists() for rank in (0, 1)))
        running.signal_group(number)
        assert running.end() == 75, running.err.read_text()
        assert running.err.read_text() == ""


def test_a_script_that_does_not_handle_a_signal_is_ended(
    tmp_path: Path, env: dict[str, str]
) -> None:
    with held("hold", tmp_path, env) as running:
        running.signal_group(signal.SIGINT)
        assert running.end() == 130
        assert running.err.read_text() == "\nstopped\n"


def test_kill_9_of_a_rank_ends_the_others_and_all_that_they_started(
    tmp_path: Path, env: dict[str, str]
) -> None:
    with held("hold", tmp_path, env) as running:
        os.kill(int((tmp_path / "held.0").read_text().split()[0]), signal.SIGKILL)
        assert running.end() == 1


def test_kill_9_of_the_launcher_leaves_no_rank_and_nothing_that_one_has_started(
    tmp_path: Path, short_folder: Path
) -> None:
    with held("hold", tmp_path, {"TMPDIR": str(short_folder)}) as running:
        children = {
            psutil.Process(int((tmp_path / f"held.{rank}").read_text().split()[1]))
            for rank in (0, 1)
        }
        assert children <= set(running.alive())
        running.process.kill()
        assert running.end() == -signal.SIGKILL


LOADS = """
import os, pathlib, time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        pathlib.Path("worker").write_text(str(os.getpid()))
        time.sleep(1000)
next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1)))
"""


def test_kill_9_of_the_launcher_leaves_no_worker_of_a_data_loader(
    tmp_path: Path, short_folder: Path
) -> None:
    (tmp_path / "loads.py").write_text(LOADS)
    with started("run", "loads.py", cwd=tmp_path, env={"TMPDIR": str(short_folder)}) as running:
        running.wait_for(tmp_path / "worker")
        worker = psutil.Process(int((tmp_path / "worker").read_text()))
        running.process.kill()
        wait_until(lambda: not is_alive(worker))


def test_a_signal_while_nodes_are_missing_ends_the_wait(
    tmp_path: Path, env: dict[str, str]
) -> None:
    node_flags = (
        "--nodes",
        2,
        "--rdzv-endpoint",
        f"127.0.0.1:{find_free_port()}",
        "--local-addr",
        "127.0.0.1",
    )
    with started("run", *node_flags, SCRIPT, "about", cwd=tmp_path, env=env) as running:
        wait_until(
            lambda: any(
                c.status == psutil.CONN_LISTEN for c in running.process.net_connections("tcp")
            )
        )
        running.process.terminate()
        assert running.end() == 1


# -- bad input -------------------------------------------------------------------------------------

BAD: list[tuple[tuple[object, ...], str]] = [
    (("nowhere.py",), "script nowhere.py does not exist"),
    (("/",), "script / is a folder without __main__.py"),
    (("--log-dir", "/proc/none", "--nproc", 2, SCRIPT), "--log-dir /proc/none cannot be written"),
    (("--ssh", "", "--hosts", "a", SCRIPT), "--ssh names no command"),
    (("--ssh", "'", "--hosts", "a", SCRIPT), '--ssh "\'" is not a command'),
    (("--nproc", 10**6, SCRIPT), "--nproc 1000000 on a machine"),
    (("-m", "no_such_module.x"), "-m no_such_module.x: there is no such module"),
    (("--no-python", "no-such-command"), "command no-such-command does not exist"),
    (("-m", "--no-python", "json"), "-m and --no-python"),
    (("--nproc", "two", SCRIPT), "--nproc 'two'"),
    (("--nproc", "1:2", "--nodes", 2, SCRIPT), "only one of them can be a range"),
    (("--nodes", 2, SCRIPT), "--nodes 2 without an address to meet at"),
    (
        ("--nodes", 2, "--rdzv-endpoint", "localhost:29500", SCRIPT),
        "localhost is this machine's loopback address",
    ),
    (
        ("--nodes", 2, "--rdzv-endpoint", "[fe80::1]:29500", SCRIPT),
        "fe80::1 is a link-local address",
    ),
    (("--nodes", 2, "--rdzv-endpoint", "nowhere", SCRIPT), "'nowhere' is not HOST:PORT"),
    (("--nodes", 2, "--rdzv-endpoint", "::1", SCRIPT), "--rdzv-endpoint [::1]:29400"),
    (
        ("--nodes", 2, "--timeout", 1, "--rdzv-endpoint", "no-name.invalid:1", SCRIPT),
        "no-name.invalid is not known",
    ),
    (
        ("--nodes", 2, "--node-rank", 2, "--master-addr", "10.0.0.1", SCRIPT),
        "--node-rank 2 of 2 nodes",
    ),
    (("--redirects", "9", SCRIPT), "--redirects '9'"),
    (("--tee", "9", SCRIPT), "--tee '9'"),
    (("--local-ranks-filter", "a", SCRIPT), "--local-ranks-filter 'a'"),
    (("--signals-to-handle", "SIGNONE", SCRIPT), "'SIGNONE' is not a signal"),
    (
        ("--rdzv-conf", "x", "--nodes", 2, "--rdzv-endpoint", "10.0.0.1:1", SCRIPT),
        "--rdzv-conf: 'x' has no value",
    ),
    (("--no-such-flag", SCRIPT), "No such option"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_one_line(
    args: tuple[object, ...], message: str, tmp_path: Path, env: dict[str, str]
) -> None:
    refused(run("run", *args, cwd=tmp_path, env=env), message)


def test_a_port_in_use_is_one_line(tmp_path: Path, env: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(
            run("run", *NPROC, "--master-port", port, SCRIPT, cwd=tmp_path, env=env),
            f"{port} is in use",
        )


def test_a_rank_that_dies_of_a_signal_before_its_launcher_gets_it_was_stopped(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """A batch system sends it to all processes, in any order."""
    (tmp_path / "waits.py").write_text(
        "import os, time\n"
        "open('new', 'w').write(str(os.getpid()))\n"
        "os.rename('new', 'pid')\n"
        "time.sleep(1000)\n"
    )
    word = tmp_path / "ended.json"
    of_job = {END_FILE_VARIABLE: f"7:{word}", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    with started("run", "--nproc", 1, "waits.py", cwd=tmp_path, env=env | of_job) as running:
        wait_until((tmp_path / "pid").exists, running.err.read_text)
        rank = psutil.Process(int((tmp_path / "pid").read_text()))
        rank.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_alive(rank))
        running.popen.send_signal(signal.SIGTERM)
        assert running.popen.wait(60) == 1
        assert "stopped by SIGTERM" in running.err.read_text()
    assert json.loads(word.read_text())["code"] == 143
