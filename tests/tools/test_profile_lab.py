"""`profile` in an allocation of a real Slurm: the ranks of two nodes on one time axis."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labs import TestLab
from processes import JOBS

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SALLOC = ("salloc", "--quiet", "--nodes", 2, "--ntasks-per-node", 1)


@pytest.mark.parametrize("words", [("mlp",), (JOBS / "tutorial.py", "--", 20, 99)])
def test_two_nodes(words: tuple[object, ...], lab: TestLab, tmp_path: Path) -> None:
    inside = (
        "stepladder",
        "run",
        "--nproc",
        1,
        "-m",
        "stepladder",
        "profile",
        "--out",
        "found",
        *words,
    )
    shown = lab.slurm(*SALLOC, *inside, cwd=tmp_path)
    assert shown.count("of the step") == 1, "one table, of the first rank"
    found = json.loads((tmp_path / "found" / "profile.json").read_text())
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1] and "n2: moved by" in found["clock"]
    assert all(rank["backward"] > 0 for rank in found["ranks"])
    assert len(list((tmp_path / "found" / "tensorboard").iterdir())) == 2
    assert {path.name for path in tmp_path.iterdir()} <= {"found", "snapshot.pt"}
