"""The word that ranks leave for a batch script decides nothing about them."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from jobs.faults import FAULT, install
from processes import JOBS, run
from stepladder.core.errors import STOPPED
from stepladder.rank import exit_record
from stepladder.rank.exit_record import END_FILE_VARIABLE, read_end, write_end

JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}


@pytest.mark.ranks
@pytest.mark.parametrize("path", ["/proc/none/ended.json", "file/ended.json", "folder"])
def test_a_finished_run_has_finished_where_its_word_cannot_be_written(
    tmp_path: Path, path: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for content in (
        ("train", JOBS / "secret.py", "--run-dir", "run"),
        ("run", JOBS / "script.py", "about"),
    ):
        done = run(*content, cwd=tmp_path, env={END_FILE_VARIABLE: f"7:{path}", **JOB})
        assert done.returncode == 0, done.stderr
        assert f"stepladder: {END_FILE_VARIABLE} {path} cannot be written: " in done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 4


@pytest.mark.parametrize("times", [2, None])
def test_a_network_file_system_that_is_down_for_a_while_is_waited_for(
    times: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Where it stays down the run has ended all the same."""
    install(monkeypatch.setattr)
    monkeypatch.setattr(exit_record, "RECORD_RETRY_INTERVAL_S", 0.0)
    if times is None:
        monkeypatch.setattr(exit_record, "RECORD_TIMEOUT_S", 0.0)
    file = tmp_path / "ended.json"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(END_FILE_VARIABLE, f"7:{file}")
    FAULT.plant("ended.json", errno.ESTALE, count=times)
    try:
        write_end(STOPPED, step=3)
    finally:
        FAULT.end()
    said = capfd.readouterr().err
    if times is None:
        assert "the batch script takes the ranks' exit code instead" in said
        assert f"{file} cannot be written: Stale file handle" in said and not file.exists()
    else:
        record = read_end()
        assert record is not None and (record["code"], record["step"]) == (STOPPED, 3)
        assert not said
