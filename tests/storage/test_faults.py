"""Errors of the file system at each kind of file of a run directory: one line with the file, and
the same bits later."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from jobs.faults import FAULT, install
from processes import JOBS, audited, run, train
from stepladder.core.errors import DISK_HINT, InputError, StorageFault
from stepladder.launcher.nodes.generation import Generation
from stepladder.launcher.nodes.run_dir_rendezvous import RunDirRendezvous
from stepladder.storage import lock as locks
from stepladder.storage.ledger import Ledger, LedgerHeader
from stepladder.storage.run_dir import RunDir
from stepladder.storage.run_dir_access import (
    FREE_SPACE_HINT,
    OTHER_WRITER_HINT,
    translate_storage_errors,
)
from stepladder.storage.run_files import CONFIG_FILE, METRICS_FILE, RESULT_FILE, read_stored_json
from stepladder.storage.snapshot_store import Snapshots

ERRORS = ["ENOSPC", "EDQUOT", "EROFS", "EIO", "ENXIO", "ENODEV", "ESTALE", "ETIMEDOUT"]
PASSING = {"ESTALE", "ETIMEDOUT"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    opened = RunDir(tmp_path / "run", 0)
    yield opened
    opened.close()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch.setattr)
    yield
    FAULT.end()


def write_ledger(run_dir: RunDir) -> None:
    ledger = Ledger(run_dir.path, LedgerHeader(1, 0, 1, 0, ""))
    try:
        ledger.record_step(1, 0, [])
        ledger.flush(fsync=True)
    finally:
        ledger.file.close()


def save_snapshot(run_dir: RunDir) -> None:
    snapshots = Snapshots(run_dir.path / "snapshots", guard=run_dir.validate_ownership)
    snapshots.save(1, torch.nn.Linear(1, 1), {}, {"ledger": ""})
    snapshots.wait()


def cut_metrics(run_dir: RunDir) -> None:
    (run_dir.path / METRICS_FILE).touch()
    run_dir.truncate_metrics(0, 1)


def publish(run_dir: RunDir) -> None:
    rendezvous = RunDirRendezvous(run_dir.path, "", "", False, 1.0)
    rendezvous._publish(Generation(1, "127.0.0.1", 1, ""))


# By the name of the file: what writes it.
WRITERS: dict[str, Callable[[RunDir], None]] = {
    CONFIG_FILE: lambda run_dir: run_dir.write_json(CONFIG_FILE, {"definition": {}}),
    RESULT_FILE: lambda run_dir: run_dir.write_json(RESULT_FILE, {"steps": 1}),
    METRICS_FILE: cut_metrics,
    "ledger": write_ledger,
    "snapshots": save_snapshot,
    "rendezvous.json": publish,
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", WRITERS)
def test_what_cannot_be_written_is_named_and_is_written_later(
    name: str, error: str, run_dir: RunDir, faults: None
) -> None:
    FAULT.plant(f"run/{name}", getattr(errno, error))
    with (
        pytest.raises(StorageFault if error in PASSING else InputError) as raised,
        translate_storage_errors(run_dir.path),
    ):
        WRITERS[name](run_dir)
    FAULT.end()
    assert f"run/{name}" in str(raised.value)
    assert os.strerror(getattr(errno, error)) in str(raised.value)
    WRITERS[name](run_dir)


@pytest.mark.parametrize("error", ["EIO", "ESTALE"])
def test_what_cannot_be_read_is_named(error: str, run_dir: RunDir, faults: None) -> None:
    run_dir.write_json(CONFIG_FILE, {"definition": {}})
    FAULT.plant(f"run/{CONFIG_FILE}", getattr(errno, error))
    with (
        pytest.raises(StorageFault if error in PASSING else InputError) as raised,
        translate_storage_errors(run_dir.path),
    ):
        read_stored_json(run_dir.path, CONFIG_FILE)
    FAULT.end()
    assert f"run/{CONFIG_FILE}" in str(raised.value)


def test_a_snapshot_that_cannot_be_read_for_a_while_is_not_taken_for_a_damaged_one(
    run_dir: RunDir, faults: None
) -> None:
    save_snapshot(run_dir)
    snapshots = Snapshots(run_dir.path / "snapshots")
    FAULT.plant("model.safetensors", errno.ESTALE)
    with pytest.raises(StorageFault, match=r"model\.safetensors cannot be read: Stale file handle"):
        snapshots.latest()
    FAULT.end()
    assert snapshots.latest() is not None


@pytest.mark.parametrize("error", [*ERRORS, "EACCES"])
def test_a_lock_that_cannot_be_read_for_a_moment_is_not_lost(
    error: str, run_dir: RunDir, faults: None
) -> None:
    FAULT.plant("run/lock", getattr(errno, error), count=2)
    run_dir.validate_ownership()
    assert FAULT.left == 0


def test_a_lock_that_cannot_be_read_for_long_is_no_other_run(
    run_dir: RunDir, faults: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "LOCK_READ_TIMEOUT_S", 0.0)
    FAULT.plant("run/lock", errno.ESTALE)
    with pytest.raises(StorageFault, match=r"run/lock cannot be read, .* Stale file handle"):
        run_dir.validate_ownership()
    FAULT.end()
    run_dir.validate_ownership()


def test_an_error_at_a_file_of_the_job_s_own_is_the_job_s(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output"), translate_storage_errors(tmp_path / "run"):
        raise OSError(errno.EIO, "Input/output error", str(tmp_path / "run-data" / "file"))
    with pytest.raises(OSError, match="Input/output"), translate_storage_errors(tmp_path / "run"):
        raise OSError(errno.EIO, "Input/output error")  # of a file that it does not name


@pytest.mark.parametrize(
    ("error", "hint"),
    [("ENOSPC", FREE_SPACE_HINT), ("EIO", DISK_HINT), ("ENOENT", OTHER_WRITER_HINT)],
)
def test_what_to_do_depends_on_the_error(error: str, hint: str, tmp_path: Path) -> None:
    number = getattr(errno, error)
    with pytest.raises(InputError) as raised, translate_storage_errors(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path / METRICS_FILE))
    assert raised.value.hint == hint


# -- whole runs ------------------------------------------------------------------------------------

JOB = JOBS / "faulty_files.py"
RUN_DIR = Path("runs/faulty_files")
FLAGS = "--sync", "exact", "--snapshot-every", 2


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(train(JOB, *FLAGS, cwd=tmp_path_factory.mktemp("unbroken"))["weights_sha256"])


# What fails, with which error, from which step on; the exit code.
RUNS = [
    ("metrics.jsonl", "EIO", 5, 2), ("ledger", "ESTALE", 5, 1), ("snapshots", "EROFS", 5, 2),
    ("config.json", "EIO", 0, 2),
]  # fmt: skip
MORE = [
    ("timing.jsonl", "EDQUOT", 5, 2), ("metrics.jsonl", "ESTALE", 5, 1),
    ("timing.jsonl", "EIO", 5, 2),
    ("ledger", "EIO", 5, 2), ("ledger", "ENOSPC", 5, 2), ("snapshots", "ESTALE", 5, 1),
    ("snapshots", "EIO", 5, 2),
    ("lock", "EIO", 5, 1), ("config.json", "ESTALE", 0, 1), ("result.json", "ENODEV", 5, 2),
    ("result.json", "ESTALE", 5, 1), ("lock", "ESTALE", 5, 1), ("lock", "EROFS", 0, 2),
    ("lock", "ESTALE", 0, 1),
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "error", "step", "code"),
    [*RUNS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_a_run_ends_with_one_line_and_the_same_command_goes_on(
    name: str, error: str, step: int, code: int, tmp_path: Path, unbroken: str
) -> None:
    done = run("train", JOB, *FLAGS, cwd=tmp_path, env={"PLANT": f"{name} {error} {step}"})
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert str(RUN_DIR) in line and os.strerror(getattr(errno, error)) in line
    assert train(JOB, *FLAGS, cwd=tmp_path)["weights_sha256"] == unbroken
    assert audited(tmp_path / RUN_DIR)["ok"]


@pytest.mark.ranks
def test_curves_that_cannot_be_written_end_no_run(tmp_path: Path, unbroken: str) -> None:
    done = run("train", JOB, *FLAGS, "--json", cwd=tmp_path, env={"PLANT": "tensorboard EIO 0"})
    assert done.returncode == 0, done.stderr
    assert "tensorboard is off, training goes on" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["weights_sha256"] == unbroken


@pytest.mark.ranks
def test_where_it_passes_the_others_go_on_in_place(tmp_path: Path, unbroken: str) -> None:
    env = {"PLANT": "metrics.jsonl ESTALE 5", "ONCE": str(tmp_path / "once")}
    done = run("train", JOB, *FLAGS, "--nproc", 2, "--json", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert (
        "metrics.jsonl cannot be used: Stale file handle\n" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert "in-place recovery: continuing with 1 process" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["weights_sha256"] == unbroken
