"""Which job files a user has trained: little is kept, and nothing breaks where it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepladder.storage import trained_jobs
from stepladder.storage.trained_jobs import entries, is_remembered, record_file, remember_job


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text("a job")
    return path


def test_a_file_is_remembered_as_it_is_and_where_it_is(job: Path, tmp_path: Path) -> None:
    assert not is_remembered(job)
    for _ in range(3):
        remember_job(job)
    assert is_remembered(job) and len(entries()) == 1
    copy = tmp_path / "other" / "job.py"
    copy.parent.mkdir()
    copy.write_text("a job")
    assert not is_remembered(copy)
    job.write_text("another job")
    assert not is_remembered(job)
    job.unlink()
    assert not is_remembered(job)


def test_recipes_are_not_noted(state: Path) -> None:
    remember_job(trained_jobs.PACKAGE / "recipes" / "mlp.py")
    assert not state.exists()


def test_the_newest_are_kept(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_jobs, "MAX_LINES", 10)
    for number in range(25):
        job.write_text(str(number))
        remember_job(job)
        assert is_remembered(job) and len(entries()) <= 10


def test_what_is_damaged_is_left_out(job: Path) -> None:
    remember_job(job)
    with record_file().open("ab") as file:
        file.write(b'{"path": 3}\n\xff\xfe\n[[[[\nnull\n{"path"')
    assert is_remembered(job)
    job.write_text("another")
    remember_job(job)
    assert is_remembered(job)


@pytest.mark.parametrize("obstacle", ["a file", "a folder", "a fifo", "a link", "no home"])
def test_where_nothing_can_be_remembered_nothing_is(
    obstacle: str, job: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_file()
    if obstacle == "a file":
        state.touch()
    elif obstacle == "no home":
        monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    else:
        record.parent.mkdir(parents=True)
    if obstacle == "a folder":
        record.mkdir()
    elif obstacle == "a fifo":
        os.mkfifo(record)
    elif obstacle == "a link":
        (state / "theirs").touch()
        record.symlink_to(state / "theirs")
    remember_job(job)
    assert not is_remembered(job)
    if obstacle == "a link":
        assert (state / "theirs").read_bytes() == b""


def test_what_others_may_have_written_is_not_believed(job: Path) -> None:
    remember_job(job)
    record_file().chmod(0o666)
    assert not is_remembered(job)
