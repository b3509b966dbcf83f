"""docs/any-loop.md: its scripts are killed, and resume on another number of ranks with no sample
lost or repeated.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from pages import EXAMPLES
from processes import Started, audited, run, started, wait_until

# Each script, the package that it needs, and what a rank has saved when the file is there.
SCRIPTS = {
    "loader_ddp": ("", "loader_ddp.pt"),
    "loader_accelerate": ("accelerate", "loader_accelerate"),
    "loader_lightning": ("lightning", "loader_lightning/last.ckpt"),
    "loader_trainer": ("transformers", "loader_trainer/checkpoint-*/loader.json"),
}
BEFORE = ("plain.py", "lightning_before.py", "trainer_before.py")
SPARE_EPOCHS = 1000


def command(name: str, nproc: int, epochs: int) -> list[object]:
    devices = ("--devices", nproc) if name == "loader_lightning" else ()
    return ["run", "--nproc", nproc, f"{name}.py", *devices, "--epochs", epochs]


def is_stopped_after_steps(running: Started, saved: Iterable[Path], ledger: Path) -> bool:
    """Stop a script; let it go on if it has done no step since it saved."""
    running.record_family()
    for process in running.alive():
        process.suspend()
    files = [file for path in saved for file in (path, *path.rglob("*"))]
    if max(file.stat().st_mtime_ns for file in files) < ledger.stat().st_mtime_ns:
        return True
    for process in running.alive():
        process.resume()
    return False


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_script_resumes_on_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    package, checkpoint = SCRIPTS[name]
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for file in (f"{name}.py", *BEFORE):
        shutil.copy(EXAMPLES / file, tmp_path)
    ledger = tmp_path / "runs" / name / "ledger" / "attempt-0001.rank-0.jsonl"
    with started(*command(name, 2, SPARE_EPOCHS), cwd=tmp_path) as killed:
        wait_until(lambda: any(tmp_path.glob(checkpoint)) or killed.popen.poll() is not None)
        wait_until(lambda: is_stopped_after_steps(killed, tmp_path.glob(checkpoint), ledger))
    epochs = 3 + ledger.read_text().count("\n") // 23
    done = run(*command(name, 3, epochs), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = audited(tmp_path / "runs" / name)
    assert result["ok"] and result["attempts"] == 2 and result["superseded"] > 0, result
    assert [epoch["never_seen"] for epoch in result["epochs"]] == [0] * epochs
