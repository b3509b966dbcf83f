"""A run directory that others may write to: a link that they put there leads the run into no file
elsewhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from processes import JOBS, refused, run
from stepladder.core import durable, jsonl
from stepladder.core.errors import InputError
from stepladder.core.safe_open import is_foreign_link, open_without_links
from stepladder.launcher.local.output import LogFiles
from stepladder.storage.ledger import Ledger, LedgerHeader, ledger_path
from stepladder.storage.run_dir import RunDir
from stepladder.storage.run_files import MANIFEST_FILE
from stepladder.storage.snapshot import MODEL_FILE, STATE_FILE, write_snapshot_files

STRANGER = 64000
ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
FILES = [
    "config.json", "result.json", "metrics.jsonl", "timing.jsonl", "launches.jsonl", "loggers.json",
    "ended.json",
    "requeues.jsonl", "rendezvous.json", "rendezvous.secret", "rendezvous.seats",
    "log/attempt-0.rank-1.log",
    "steps/rank-0.jsonl",
]  # fmt: skip


@pytest.fixture
def victims(tmp_path: Path) -> Path:
    """A file of the user's elsewhere, which nothing here may change."""
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "authorized_keys"
    path.write_text("the user's\n")
    return path


def planted(run_dir: Path, name: str, victims: Path) -> Path:
    """A link in the run directory to the victim's file, as somebody who shares the directory makes
    it.
    """
    link = run_dir / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victims)
    if os.geteuid() == 0:
        os.lchown(link, STRANGER, STRANGER)
    return link


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_the_place_of_a_file_is_refused_when_the_directory_is_opened(
    tmp_path: Path, victims: Path, name: str
) -> None:
    planted(tmp_path / "run", name, victims)
    with pytest.raises(
        InputError, match=f"{name} is a link to {victims}, and a run writes into its own directory"
    ):
        RunDir(tmp_path / "run", 0)
    assert victims.read_text() == "the user's\n"


def open_of_ledger(path: Path) -> None:
    Ledger(path.parent.parent, LedgerHeader(1, 0, 1, 0, ""))


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a line is added": ("timing.jsonl", lambda path: jsonl.append_record(path, {"step": 1})),
    "a file is opened to add to it": ("metrics.jsonl", jsonl.open_for_append),
    "a ledger": ("ledger/" + ledger_path(Path(), 1, 0).name, open_of_ledger),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_that_comes_while_a_run_trains_is_not_followed(
    tmp_path: Path, victims: Path, writer: str
) -> None:
    name, write = WRITERS[writer]
    link = planted(tmp_path / "run", name, victims)
    with pytest.raises(
        OSError, match="it is a link, and a run writes into no other directory"
    ) as error:
        write(link)
    assert error.value.filename == str(link)
    assert victims.read_text() == "the user's\n"


def test_a_file_that_is_replaced_takes_the_place_of_the_link(tmp_path: Path, victims: Path) -> None:
    link = planted(tmp_path / "run", "result.json", victims)
    durable.write(link, "{}")
    assert (
        victims.read_text() == "the user's\n" and not link.is_symlink() and link.read_text() == "{}"
    )


def test_a_link_in_the_place_of_what_is_written_aside_is_not_followed(
    tmp_path: Path, victims: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member of the group may see the name, and be faster."""
    close = os.close

    def swap(file: int) -> None:
        close(file)
        for aside in tmp_path.glob("result.json.*"):
            if not aside.is_symlink():
                aside.unlink()
                aside.symlink_to(victims)

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", swap)
        with pytest.raises(OSError, match="it is a link"):
            durable.write(tmp_path / "result.json", "{}")
    assert victims.read_text() == "the user's\n" and not (tmp_path / "result.json").exists()


def test_nobody_else_enters_a_snapshot_that_is_being_written(tmp_path: Path) -> None:
    """The group may read it, and write to it, once it is complete."""
    before = os.umask(0o002)
    try:
        with durable.replace_folder(tmp_path / "step_00000001") as aside:
            assert oct(aside.stat().st_mode & 0o777) == "0o700"
    finally:
        os.umask(before)
    assert oct((tmp_path / "step_00000001").stat().st_mode & 0o777) == "0o775"


@pytest.mark.parametrize("name", [MODEL_FILE, STATE_FILE, MANIFEST_FILE])
def test_a_link_in_the_place_of_a_snapshot_s_file_is_not_followed(
    tmp_path: Path, victims: Path, name: str
) -> None:
    """Somebody was faster than the folder's mode."""
    (tmp_path / name).symlink_to(victims)
    with pytest.raises(OSError) as error:
        write_snapshot_files(tmp_path, {"model": {"w": torch.ones(1)}, "state": {}}, {}, [])
    assert error.value.filename == str(tmp_path / name)
    assert victims.read_text() == "the user's\n"


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_what_is_no_regular_file_is_not_opened(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError) as error:
        open_without_links(tmp_path / "file", os.O_WRONLY | os.O_APPEND)
    assert error.value.errno in (errno.ENXIO, errno.EISDIR, errno.ELOOP)
    if not (tmp_path / "file").is_dir():
        with pytest.raises(OSError):
            open_without_links(tmp_path / "file", os.O_RDWR)


@ONLY_ROOT
def test_a_folder_that_another_user_has_linked_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other" / "step_00000001").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "other")
    os.lchown(tmp_path / "run" / "snapshots", STRANGER, STRANGER)
    with pytest.raises(InputError, match="snapshots is a link to "):
        RunDir(tmp_path / "run", 0)
    with pytest.raises(OSError, match="its folder is a link of another user's"):
        open_without_links(tmp_path / "run" / "snapshots" / "file", os.O_WRONLY | os.O_CREAT)


def test_a_folder_that_its_user_has_linked_is_used(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "disk")
    assert not is_foreign_link(tmp_path / "run" / "snapshots")
    RunDir(tmp_path / "run", 0).close()


@pytest.mark.ranks
def test_train_and_run_refuse_a_linked_file_in_one_line(tmp_path: Path, victims: Path) -> None:
    planted(tmp_path / "run", "timing.jsonl", victims)
    done = run(
        "train", "mlp", "--steps", 1, "--samples", 64, "--run-dir", tmp_path / "run", cwd=tmp_path
    )
    refused(done, "timing.jsonl is a link to ", "another --run-dir")
    planted(tmp_path / "script", "launches.jsonl", victims)
    done = run("run", "--run-dir", tmp_path / "script", JOBS / "script.py", "about", cwd=tmp_path)
    refused(done, "launches.jsonl is a link to ", "another --run-dir")
    assert victims.read_text() == "the user's\n"
    assert [path.name for path in victims.parent.iterdir()] == ["authorized_keys"]


def test_what_ranks_print_is_not_added_to_a_linked_log(
    tmp_path: Path, victims: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    logs = LogFiles(tmp_path / "run" / "log")
    logs.begin()
    planted(tmp_path / "run", "log/attempt-0.rank-1.log", victims)
    logs.append("attempt-0.rank-1.log", b"a line\n")
    assert victims.read_text() == "the user's\n"
    assert "the ranks' output is no longer logged" in capsys.readouterr().err
