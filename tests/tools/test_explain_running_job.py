"""`stepladder explain --pid`: hangs of scripts that plain torchrun or mp.spawn has started are named
as `run` names them; of a job that moves it says so.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hang_kinds import SAID_BY_GLOO, SCRIPT
from pages import documented_keys
from processes import Started, refused, run, started, wait_until
from stepladder.core.errors import InputError
from stepladder.rank.stacks import Stack
from stepladder.tools.explain import running_job
from stepladder.tools.explain.running_job import find_job, find_ranks, observe_job

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# A new interpreter, whose ranks are its children: what tests fork has them elsewhere.
COLD = {"PYTHONHASHSEED": "0"}
# gloo ends the other kinds with an error, and torchrun ends the job.
KINDS = ("barrier", "save", "worker", "lock", "group", "recv", "new-group")
# Only `run` knows the members of each group.
SAID = {kind: SAID_BY_GLOO[kind] for kind in KINDS} | {
    "group-order": r"all ranks wait in new_group, called by group_in_other_order\(\).*\n.* groups that differ"
}
SPAWNING = """
import sys, time
import torch.multiprocessing as mp
import torch.distributed as dist

def train(rank):
    dist.init_process_group("gloo", "file://" + sys.argv[1], rank=rank, world_size=2)
    if rank == 0:
        time.sleep(1000)
    dist.barrier()

if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
"""

LOOP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10**9):
    dist.all_reduce(torch.ones(1))
    if step == 100:
        open("first", "w").close()
"""


def explain(running: Started, *flags: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run("explain", "--pid", running.popen.pid, "--seconds", 1, *flags, cwd=cwd)


@contextmanager
def explained(
    pattern: str, cwd: Path, *command: object, program: tuple[str, ...] = TORCHRUN
) -> Iterator[Started]:
    """A job, once `explain` says what is in the pattern."""
    said = ""

    def is_said() -> bool:
        nonlocal said
        assert running.popen.poll() is None, running.err.read_text()
        done = run("explain", "--pid", running.popen.pid, "--seconds", 1, cwd=cwd)
        said = f"{done.returncode}\n{done.stdout}{done.stderr}"
        return (
            re.search(rf"^0\nstepladder: a rank has not moved for 1 s: .*{pattern}", said)
            is not None
        )

    with started(*command, cwd=cwd, command=program, env=COLD) as running:
        wait_until(is_said, lambda: said, every=0.25)
        yield running


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", SAID)
def test_a_hang_under_torchrun_is_explained(kind: str, tmp_path: Path) -> None:
    with explained(SAID[kind], tmp_path, SCRIPT, kind):
        pass


@pytest.mark.ranks
@pytest.mark.slow
def test_a_hang_of_spawned_ranks_is_explained_in_json_too(tmp_path: Path) -> None:
    (tmp_path / "spawn.py").write_text(SPAWNING)
    pattern = r"rank 0 \(pid \d+\): it is in train\(\), spawn.py:9 .*; the others wait in barrier"
    program = (sys.executable, "spawn.py")
    with explained(pattern, tmp_path, tmp_path / "store", program=program) as running:
        found = json.loads(explain(running, "--json", cwd=tmp_path).stdout)
    assert found["stands_still"] and found["rank"] == 0 and "train()" in found["sentence"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found.keys() == documented_keys("explain --pid")


DEBUGGED = """
import time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _WorkerServer
from torch.distributed.debug._store import tcpstore_client

def wait_alone():
    time.sleep(1000)

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
# What start_debug_server does on each rank. Its page, on rank 0, needs packages.
server = _WorkerServer("::", 0)
tcpstore_client().set(f"rank{dist.get_rank()}", f"http://127.0.0.1:{server.port}")
if dist.get_rank() == 0:
    wait_alone()
dist.barrier()
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_torch_s_debug_server_answers_where_py_spy_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(DEBUGGED)

    def refuse(pid: int) -> list[Stack]:
        raise InputError(f"py-spy may not read process {pid}", "root")

    monkeypatch.setattr(running_job, "_read_stacks", refuse)
    said = ""

    def is_said() -> bool:
        nonlocal said
        try:
            state = observe_job(find_ranks(find_job(running.popen.pid)), 1)
        except InputError as error:
            said = error.problem
            return False
        said = str(state.explanation and state.explanation.sentence)
        return "has not reached barrier 2: it is in wait_alone(), " in said

    with started("train.py", cwd=tmp_path, command=TORCHRUN, env=COLD) as running:
        wait_until(is_said, lambda: said, every=0.25)


@pytest.mark.ranks
@pytest.mark.slow
def test_of_a_job_that_moves_it_says_so(tmp_path: Path) -> None:
    """Both ranks are in one line at each look."""
    (tmp_path / "loop.py").write_text(LOOP)
    with started("loop.py", cwd=tmp_path, command=TORCHRUN, env=COLD) as running:
        wait_until((tmp_path / "first").exists, running.err.read_text)
        done = explain(running, cwd=tmp_path)
    assert done.returncode == 1 and "the job moves\n  rank 0 (pid " in done.stdout, done.stdout


def test_what_is_no_job_is_one_line(tmp_path: Path) -> None:
    refused(run("explain", "--pid", 0, cwd=tmp_path), "--pid 0: ")
    refused(run("explain", "--pid", 1 << 30, cwd=tmp_path), f"--pid {1 << 30}: no such process")
    refused(run("explain", "--pid", os.getpid(), cwd=tmp_path), "no rank among these processes")
    refused(run("explain", "--job", "none", cwd=tmp_path), "no process of this job on this machine")
    refused(run("explain", "--pid", 1, "text", cwd=tmp_path), "TEXT, --pid and --job")


def write_dumps(folder: Path) -> None:
    """As NCCL leaves them, one in each form: rank 1 is one collective behind."""
    entries = [
        {
            "frames": [{"name": "train", "filename": "/home/me/train.py", "line": 88}],
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[2, 5]],
            "state": state,
            "is_p2p": False,
        }
        for number, state in ((1, "completed"), (2, "started"))
    ]
    (folder / "trace_0").write_bytes(pickle.dumps({"entries": entries}))
    (folder / "trace_1").write_text(json.dumps({"entries": entries[:1]}))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_dumps_of_all_ranks_are_read_beside_one(rank: int, tmp_path: Path) -> None:
    write_dumps(tmp_path)
    done = run("explain", f"trace_{rank}", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(
        "stepladder: rank 1 has not reached all_reduce 2: it is past all_reduce 1, called by train(), "
        "train.py:88; the others wait. Usual cause: "
    )


def test_a_damaged_dump_beside_it_is_one_line(tmp_path: Path) -> None:
    write_dumps(tmp_path)
    (tmp_path / "trace_2").write_text("half")
    refused(run("explain", "trace_0", cwd=tmp_path), "a file beside it: trace_2 is not a dump")
