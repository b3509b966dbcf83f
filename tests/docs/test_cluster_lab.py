"""docs/cluster.md, typed as it stands on a real Slurm: each output shown is one that comes."""

from __future__ import annotations

import getpass
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from labs import TestLab, lab_up
from pages import REPOSITORY, Block, blocks, shown_below

PAGE = REPOSITORY / "docs" / "cluster.md"
ON_THE_PAGE = ("/scratch/ada/ladder", "ada")  # the folder and the user
NUMBER = re.compile(r"[\d.,:]*\d")
QUEUED = re.compile(r" (R|PD) # # \S+$")  # of squeue: state, time, nodes, where or why not

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def typed() -> list[Block]:
    return [block for block in blocks(PAGE) if block.mark == "run on the lab"]


def shape(line: str) -> str:
    """Without what is another one each time: numbers, how far they push words apart, which jobs run
    already.
    """
    return QUEUED.sub("", " ".join(NUMBER.sub("#", line).split()))


def answer(lab: TestLab, block: Block, folder: Path) -> set[str]:
    words = lab.slurm("bash", "-euo", "pipefail", "-c", block.text, cwd=folder)
    for real, on_the_page in zip((str(folder), getpass.getuser()), ON_THE_PAGE, strict=True):
        words = re.sub(rf"(?<!\w){re.escape(real)}(?!\w)", on_the_page, words)
    return {shape(line) for line in words.splitlines()}


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """Yields a folder on a disk: the doctor warns of a run directory in memory, as tmp_path may be."""
    with tempfile.TemporaryDirectory(prefix="stepladder-test-", dir="/var/tmp") as folder:
        yield Path(folder)


def test_what_the_page_shows_is_what_slurm_and_the_jobs_print(
    mnist_dir: Path, on_disk: Path
) -> None:
    """In order: later blocks name the jobs of earlier ones by number, so the lab is a fresh one."""
    assert len(typed()) == 8
    with lab_up("--nodes", 2, "--gpus", 2) as lab:
        lab.env["MNIST"] = str(mnist_dir)
        for block in typed():
            shown = shown_below(block)
            assert shown, f"{block} shows nothing"
            came = answer(lab, block, on_disk)
            missing = [line for line in shown if shape(line) not in came]
            assert not missing, f"{block} shows {missing}; what came:\n" + "\n".join(sorted(came))
