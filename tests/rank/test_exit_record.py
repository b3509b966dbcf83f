"""The word that ranks leave for a batch script decides nothing about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processes import JOBS, run
from stepladder.rank.exit_record import END_FILE_VARIABLE

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
