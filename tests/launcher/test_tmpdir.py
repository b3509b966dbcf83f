"""The temporary directory is not in the path of a training: it may be full, read-only or gone
meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from processes import COMMAND, JOBS, audited, run, train

pytestmark = pytest.mark.ranks

JOB = JOBS / "loses_tmpdir.py"
RUN_DIR = "runs/loses_tmpdir"
EXACT = "--sync", "exact"
# In namespaces of its own, where a user without privileges may mount, and nothing stays mounted.
MOUNTING = (
    ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")
)
MOUNT = 'mount -t tmpfs -o size=1m,nr_inodes=100 none "$TMPDIR" && exec "$@"'


@pytest.fixture(scope="module")
def may_mount(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("mounted")
    command = [*MOUNTING, "sh", "-c", MOUNT, "sh", "true"]
    try:
        tried = subprocess.run(
            command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare, which mounts a file system of a test's own")
    if tried.returncode:
        pytest.skip(f"no file system may be mounted here: {tried.stderr.decode().strip()}")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the weights' hash of a training that nothing happens to."""
    folder = tmp_path_factory.mktemp("t")
    return str(
        train(JOB, *EXACT, cwd=folder, env={"TMPDIR": str(folder), "PLANT": "none"})[
            "weights_sha256"
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "plant"),
    [
        pytest.param(2, "full", marks=pytest.mark.slow),
        (2, "gone"),
        pytest.param(2, "read-only", marks=pytest.mark.slow),
        *(
            pytest.param(1, plant, marks=pytest.mark.slow)
            for plant in ("full", "read-only", "gone")
        ),
    ],
)
def test_a_training_goes_on_without_its_temporary_directory(
    nproc: int, plant: str, tmp_path: Path, short_folder: Path, may_mount: None, unbroken: str
) -> None:
    """One of two ranks is killed and replaced in place meanwhile; workers of data loaders begin
    anew.
    """
    (mounted := short_folder / "tmp").mkdir()
    env = {"TMPDIR": str(mounted), "PLANT": plant}
    if nproc > 1:
        env["KILLED"] = str(tmp_path / "killed")
    command = (*MOUNTING, "sh", "-c", MOUNT, "sh", *COMMAND)
    done = run(
        "train", JOB, *EXACT, "--nproc", nproc, "--json", cwd=tmp_path, env=env, command=command
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["weights_sha256"] == unbroken
    assert "Traceback" not in done.stderr
    if nproc > 1:
        assert "in-place recovery: continuing with 1 process" in done.stderr, done.stderr
        assert "another process has joined: continuing with 2 processes" in done.stderr, done.stderr
        assert audited(tmp_path / RUN_DIR)["ok"]
        assert "a rank prints\n" in (tmp_path / RUN_DIR / "log/attempt-0.rank-1.log").read_text()
