"""The front page: its commands run, and print what is shown below them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pages import REPOSITORY, Block, blocks, missing_lines, run_block

README = REPOSITORY / "README.md"
LONGEST = 110
# The tutorial, where this machine has a clone of pytorch/examples and no network.
CLONE = os.environ.get("PYTORCH_EXAMPLES", "")
CURL = """curl() {
  cp "$PYTORCH_EXAMPLES"/distributed/ddp-tutorial-series/{multigpu_torchrun,datautils}.py .
}
"""


def doors(mark: str) -> list[Block]:
    return [block for block in blocks(README) if block.mark == mark]


def test_it_is_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= LONGEST and len(text.split()) <= 900


def test_each_door_shows_its_output() -> None:
    run = [block for block in blocks(README) if block.mark.startswith("run")]
    assert len(run) == 3 and all(block.output for block in run)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_that_is_killed_prints_what_is_shown(tmp_path: Path) -> None:
    _, block = doors("run")
    printed = run_block(block, tmp_path)
    assert missing_lines(block.output, printed) == [], printed


def test_the_conversion_is_that_of_its_page() -> None:
    """The page's own test runs it, which takes a minute and a half."""
    door, _ = doors("run")
    page = (REPOSITORY / "docs" / "convert.md").read_text()
    lines = {line.strip() for line in page.splitlines()}
    converts, runs = [line for line in door.text.splitlines() if line.startswith("stepladder")]
    shown = {line.strip() for line in door.output.splitlines()}
    assert {converts.partition(";")[0], runs} | shown <= lines


@pytest.mark.ranks
@pytest.mark.slow
def test_check_finds_in_the_tutorial_what_is_shown(tmp_path: Path) -> None:
    [block] = doors("run with the tutorial")
    fetch, command = [line for line in block.text.splitlines() if not line.startswith("#")]
    setup = CURL if CLONE else ""
    fetched = subprocess.run(
        ["bash", "-ec", setup + fetch], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if fetched.returncode:
        pytest.skip(f"raw.githubusercontent.com cannot be reached: {fetched.stderr.strip()}")
    printed = run_block(replace(block, text=f"{command}\n"), tmp_path, exit_code=1)
    assert missing_lines(block.output, printed) == [], printed


def test_an_output_that_differs_is_noticed() -> None:
    printed = "one pid 7\ntwo 0.25 three\n" + "a" * 64 + "\n" + "a" * 64 + "\n"
    same = "one pid 8\ntwo 0.5\n  three\n" + "b" * 64 + "\n" + "b" * 64 + "\n"
    assert missing_lines(same, printed) == []
    assert missing_lines("two 1.5\none pid 9\n", printed) == ["one pid N"]
    assert missing_lines("b" * 64 + "\n" + "c" * 64 + "\n", printed) == ["HASH1"]
    assert missing_lines("four\n", printed) == ["four"]
