"""benchmarks/mutants.toml explains mutants of today's code."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SURVIVORS = tomllib.loads((REPOSITORY / "benchmarks/mutants.toml").read_text())["survivor"]


@pytest.mark.parametrize("survivor", SURVIVORS, ids=lambda survivor: survivor["becomes"])
def test_the_line_that_it_changes_is_there(survivor: dict[str, str]) -> None:
    """Else the benchmark would count a survivor that is explained as one that is not."""
    source = (REPOSITORY / "src/stepladder" / survivor["file"]).read_text()
    assert survivor["was"] in [line.strip() for line in source.splitlines()]
