"""Which job files a user has trained: little is kept, and nothing breaks where it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepladder.storage import trained_jobs
from stepladder.storage.trained_jobs import (
    read_entries,
    record_path,
    record_trained_job,
    was_trained_before,
)


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
    assert not was_trained_before(job)
    for _ in range(3):
        record_trained_job(job)
    assert was_trained_before(job) and len(read_entries()) == 1
    copy = tmp_path / "other" / "job.py"
    copy.parent.mkdir()
    copy.write_text("a job")
    assert not was_trained_before(copy)
    job.write_text("another job")
    assert not was_trained_before(job)
    job.unlink()
    assert not was_trained_before(job)


def test_recipes_are_not_noted(state: Path) -> None:
    record_trained_job(trained_jobs.OWN_PACKAGE / "recipes" / "mlp.py")
    assert not state.exists()


def test_the_newest_are_kept(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_jobs, "MAX_RECORDED_JOBS", 10)
    for number in range(25):
        job.write_text(str(number))
        record_trained_job(job)
        assert was_trained_before(job) and len(read_entries()) <= 10


def test_what_is_damaged_is_left_out(job: Path) -> None:
    record_trained_job(job)
    with record_path().open("ab") as file:
        file.write(b'{"path": 3}\n\xff\xfe\n[[[[\nnull\n{"path"')
    assert was_trained_before(job)
    job.write_text("another")
    record_trained_job(job)
    assert was_trained_before(job)


@pytest.mark.parametrize("obstacle", ["a file", "a folder", "a fifo", "a link", "no home"])
def test_where_nothing_can_be_remembered_nothing_is(
    obstacle: str, job: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_path()
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
    record_trained_job(job)
    assert not was_trained_before(job)
    if obstacle == "a link":
        assert (state / "theirs").read_bytes() == b""


def test_what_others_may_have_written_is_not_believed(job: Path) -> None:
    record_trained_job(job)
    record_path().chmod(0o666)
    assert not was_trained_before(job)
