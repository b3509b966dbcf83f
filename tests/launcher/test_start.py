"""How a run's processes come about: what is set for them before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepladder.core.errors import InputError
from stepladder.core.settings import Settings, TrainRequest
from stepladder.launcher.entry import GOMP_SPIN_COUNT, Launch, start

JOB = """
import os
from dataclasses import dataclass
from pathlib import Path
from stepladder import InputError

@dataclass
class Config:
    seed: int = 0

def build(config):
    Path({file!r}).write_text(str(os.environ.get("GOMP_SPINCOUNT")))
    raise InputError("that is all", "")
"""


@pytest.mark.parametrize(
    "given, spins",
    [({}, GOMP_SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["nothing", "a count", "a policy"],
)
def test_threads_wait_briefly_unless_told_otherwise(
    given: dict[str, str], spins: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "")  # so that what the start sets is undone, too
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    marker = tmp_path / "seen"
    job = tmp_path / "job.py"
    job.write_text(JOB.format(file=str(marker)))
    with pytest.raises(InputError, match="that is all"):
        start(TrainRequest(job, {}, Settings(tmp_path / "run", progress=False)), Launch())
    assert marker.read_text() == str(spins)


HASHES = """
from dataclasses import dataclass
from stepladder import InputError

@dataclass
class Config:
    seed: int = 0

def build(config):
    raise InputError(f"it is {hash('a text')}", "nothing")
"""


def hash_with_seed(seed: str) -> str:
    command = [sys.executable, "-S", "-c", "print(hash('a text'))"]
    done = subprocess.run(
        command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("start", "given", "seed"),
    [
        ([], {}, "0"),
        pytest.param(["--nproc", "2"], {}, "0", marks=pytest.mark.slow),
        pytest.param([], {"PYTHONHASHSEED": "1"}, "1", marks=pytest.mark.slow),
        pytest.param(["--nproc", "2"], {"PYTHONHASHSEED": "1"}, "1", marks=pytest.mark.slow),
    ],
)
def test_python_hashes_a_text_alike_in_each_start_unless_it_was_told_how(
    start: list[str], given: dict[str, str], seed: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(HASHES)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"} | given
    done = subprocess.run(
        [sys.executable, "-m", "stepladder", "train", "job.py", *start],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert f"it is {hash_with_seed(seed)}." in done.stderr
