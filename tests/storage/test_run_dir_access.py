"""What lies in the place of a file or a folder of a run directory is told before the first step, in
one line.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import COMMAND, JOBS, refused, run, train
from stepladder.core import durable
from stepladder.core.errors import InputError
from stepladder.storage.ledger import Ledger, LedgerHeader
from stepladder.storage.lock import LOCK_FILE
from stepladder.storage.run_dir import RunDir
from stepladder.storage.run_dir_access import MAX_APPENDED_BYTES
from stepladder.storage.run_files import METRICS_FILE
from stepladder.storage.snapshot_store import Snapshots

FILES = [
    "config.json", "result.json", "metrics.jsonl", "timing.jsonl", "loggers.json",
    "ended.json", "requeues.jsonl",
    "rendezvous.json", "rendezvous.secret", "log/attempt-0.rank-1.log",
]  # fmt: skip
FOLDERS = ["ledger", "snapshots", "tensorboard", "log"]


def loop(path: Path) -> None:
    path.symlink_to(path)


def hanging(path: Path) -> None:
    path.symlink_to("nowhere/at/all")


@pytest.mark.parametrize(
    "put", [Path.mkdir, os.mkfifo, loop, hanging, lambda path: path.symlink_to("/dev/null")]
)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_when_the_directory_is_opened(
    name: str, put: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    put(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=f"{name} is not a file"):
        RunDir(tmp_path, 0)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != LOCK_FILE) == before
    with pytest.raises(InputError, match=f"{name} is not a file"):  # and not: in use by another run
        RunDir(tmp_path, 0)


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_a_file_to_which_nothing_could_be_added_is_refused_when_the_directory_is_opened(
    name: str, tmp_path: Path
) -> None:
    with (tmp_path / name).open("w") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
    with pytest.raises(InputError, match=f"{name} has 1099511627776 bytes, more than"):
        RunDir(tmp_path, 0)


@pytest.mark.parametrize("put", [Path.touch, os.mkfifo, loop, hanging])
@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_no_folder_is_refused_when_the_directory_is_opened(
    name: str, put: Callable[[Path], None], tmp_path: Path
) -> None:
    put(tmp_path / name)
    with pytest.raises(InputError, match=f"{name} is not a folder"):
        RunDir(tmp_path, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger"])
def test_what_may_not_be_written_is_refused_when_the_directory_is_opened(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).touch(0o444) if "." in name else (tmp_path / name).mkdir(0o555)
    with pytest.raises(InputError, match=f"{name} cannot be written"):
        RunDir(tmp_path, 0)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo, loop])
def test_a_lock_that_is_no_file_is_one_line(put: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mlp"
    folder.mkdir(parents=True)
    put(folder / LOCK_FILE)
    refused(run("train", "mlp", "--steps", 1, cwd=tmp_path), "runs/mlp")


@pytest.mark.parametrize("fresh", [False, True])
def test_a_lock_that_is_a_link_is_refused_and_its_target_is_not_made(
    fresh: bool, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in (LOCK_FILE, "result.json"):
        (run_dir / name).symlink_to("nowhere")
    with pytest.raises(InputError, match="lock is a link, and not a file"):
        RunDir(run_dir, 0, fresh)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [LOCK_FILE, "result.json", "run"]


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
def test_training_does_not_begin_where_it_could_not_end(nproc: int, tmp_path: Path) -> None:
    """Earlier versions trained, and failed at the end."""
    for name in ("result.json", "log/attempt-0.rank-1.log"):
        folder = tmp_path / name.partition("/")[0]
        (folder / name).mkdir(parents=True)
        done = run(
            "train", "mlp", "--steps", 2, "--nproc", nproc, "--run-dir", folder, cwd=tmp_path
        )
        refused(done, f"{name} is not a file")
        assert not (folder / METRICS_FILE).exists()


@pytest.mark.ranks
def test_ranks_that_are_refused_leave_no_log(tmp_path: Path) -> None:
    """What they print before that is for nobody: another run may write there."""
    job = tmp_path / "job.py"
    job.write_text(
        (JOBS / "plain.py").read_text(encoding="utf-8") + "\nprint('here')\n", encoding="utf-8"
    )
    position = tmp_path / "its" / METRICS_FILE
    position.mkdir(parents=True)
    done = run("train", job, "--nproc", 2, "--run-dir", "its", cwd=tmp_path)
    assert done.returncode == 2 and f"{METRICS_FILE} is not a file" in done.stderr, done.stderr
    assert not (tmp_path / "its" / "log").exists()


@pytest.mark.ranks
def test_a_log_that_takes_no_more_ends_no_script(tmp_path: Path) -> None:
    """The file already has the largest size that the process may write, as on a full disk."""
    log = tmp_path / "its" / "log" / "attempt-0.rank-0.log"
    log.parent.mkdir(parents=True)
    with log.open("wb") as file:
        file.truncate(1 << 20)
    arguments = "run", "--run-dir", "its", JOBS / "script.py", "about"
    done = run(*arguments, cwd=tmp_path, command=("prlimit", f"--fsize={1 << 20}", *COMMAND))
    assert done.returncode == 0, done.stderr
    assert "is no longer logged" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    train("mlp", "--steps", 4, cwd=folder)
    return folder / "runs" / "mlp"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name, change",
    [
        ("result.json", {"steps": "4"}),
        ("result.json", {"steps": 10**400}),
        ("result.json", {"metrics": 3}),
        ("result.json", {"best": {"metric": 1}}),
        ("result.json", {"schema": "x"}),
        ("config.json", {"definition": []}),
        ("config.json", {"definition": {"seed": "a\nb" * 10_000, "batch_per_rank": "x"}}),
    ],
)
def test_a_finished_run_s_file_with_wrong_values_is_one_line(
    finished: Path, name: str, change: dict[str, object], tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "its")
    path = tmp_path / "its" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(run("train", "mlp", "--steps", 4, "--run-dir", "its", cwd=tmp_path), "its")


@pytest.mark.parametrize(
    "text",
    [
        '{"pid": 1' + "0" * 30 + "}",
        '{"attempt": 1' + "0" * 30 + "}",
        "[" * 100_000,
        '{"host": ["a"]}',
    ],
)
def test_a_lock_with_senseless_values_is_an_ended_runs(text: str, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    run_dir = RunDir(tmp_path, 0)
    assert run_dir.attempt == 1
    run_dir.close()


@pytest.mark.slow
def test_the_metrics_of_a_long_run_are_cut_in_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    run_dir = RunDir(tmp_path, 0)
    lines = [
        f'{{"step": {step}, "epoch": 0, "loss": 0.5, "lr": 0.1}}\n' for step in range(1, 100_001)
    ]
    (tmp_path / METRICS_FILE).write_text("".join(lines))
    tracemalloc.start()
    run_dir.truncate_metrics(90_000, 100)
    maximum = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    run_dir.close()
    assert (tmp_path / METRICS_FILE).read_text() == "".join(lines[:90_000])
    assert maximum < 2_000_000  # the file has 5 MB


def test_new_names_are_on_the_disk_before_what_relies_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    sync = durable.sync
    monkeypatch.setattr(durable, "sync", lambda path: (sync(path), synced.append(path)))
    run_dir = tmp_path / "runs" / "mine"
    RunDir(run_dir, 0).close()
    assert synced[:2] == [tmp_path, tmp_path / "runs"]
    Ledger(run_dir, LedgerHeader(1, 0, 1, 0, "")).close()
    assert synced[2:4] == [run_dir, run_dir / "ledger"]
    snapshots = Snapshots(run_dir / "snapshots")
    import torch

    snapshots.save(1, torch.nn.Linear(1, 1), {})
    snapshots.wait()
    assert synced[4] == run_dir and synced[-1] == run_dir / "snapshots"


def test_a_lock_file_of_any_size_is_used(tmp_path: Path) -> None:
    """Nothing is appended to it; it is cut to its length."""
    (tmp_path / LOCK_FILE).touch()
    os.truncate(tmp_path / LOCK_FILE, MAX_APPENDED_BYTES + 1)
    RunDir(tmp_path, 0).close()
    assert (tmp_path / LOCK_FILE).stat().st_size <= MAX_APPENDED_BYTES
