"""What is said when a data loader's worker ends, or cannot send its batch: one sentence, each time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes import JOBS, run

SCRIPT = JOBS / "loses_worker.py"
SMALL_SHM = "export TMPDIR=/tmp; mount -t tmpfs -o size=24m tmpfs /dev/shm && "


def lose_worker(folder: Path, how: str) -> str:
    done = run("run", "--nproc", "2", SCRIPT, how, cwd=folder, timeout=120)
    assert done.returncode == 1
    return re.sub(r"pid \d+", "pid N", done.stdout + done.stderr)


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["killed", "deaf"])
def test_a_killed_worker_is_named_with_its_cause(how: str, tmp_path: Path) -> None:
    shown = lose_worker(tmp_path, how)
    killed = "rank 1 failed: RuntimeError: DataLoader worker (pid N) is killed by signal: Killed."
    assert killed in shown and "cause: out of memory, most often" in shown
    assert "Traceback" not in shown  # where the rank was is chance


@pytest.mark.ranks
def test_a_batch_that_cannot_be_sent_is_an_error(tmp_path: Path) -> None:
    shown = lose_worker(tmp_path, "unpicklable")
    # Python 3.13 says "Can't get local object".
    failed = r"rank 1 failed: AttributeError: in DataLoader worker process 0: Can't (pickle|get)"
    assert re.search(failed, shown)


@pytest.mark.slow
@pytest.mark.ranks
def test_full_shared_memory_is_named_and_no_file_stays() -> None:
    inside = ["unshare", "--mount", "sh", "-c"]
    probe = subprocess.run([*inside, SMALL_SHM + "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this user may not mount a file system")
    command = f"{SMALL_SHM} {sys.executable} -m stepladder run --nproc 2 {SCRIPT} full; ls /dev/shm"
    done = subprocess.run(
        [*inside, command], cwd=JOBS, capture_output=True, text=True, timeout=120, check=False
    )
    assert "in DataLoader worker process" in done.stderr
    assert "cause: /dev/shm is full. HINT: " in done.stderr and "--ipc=host" in done.stderr
    assert done.stdout.split("off\n")[-1] == ""
