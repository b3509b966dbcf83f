"""docs/from.md: each diff is that of its files, and before and after train the same curve."""

from __future__ import annotations

import difflib
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from pages import EXAMPLES, REPOSITORY, blocks
from processes import run

PAGES = {
    "ddp": ("ddp_before.py", "digits_job.py"),
    "accelerate": ("accelerate_before.py", "digits_job.py"),
    "lightning": ("lightning_before.py", "digits_job.py"),
    "trainer": ("trainer_before.py", "trainer_after.py"),
}
PACKAGES = {"accelerate": "accelerate", "lightning": "lightning", "trainer": "transformers"}
STEPS = 20
RELATIVE = 1e-5
A_LOSS = re.compile(r"\bloss (\d+\.\d{7})$", re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_the_diff_on_the_page_is_that_of_the_files(name: str) -> None:
    diffs = [
        block.text.splitlines()
        for block in blocks(REPOSITORY / "docs" / "from.md")
        if block.language == "diff"
    ]
    before, after = ((EXAMPLES / file).read_text().splitlines() for file in PAGES[name])
    assert diffs[list(PAGES).index(name)] == list(
        difflib.unified_diff(before, after, *PAGES[name], n=1, lineterm="")
    )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", PAGES)
def test_before_and_after_have_the_same_losses(name: str, tmp_path: Path) -> None:
    """On two processes, the whole data in one batch, so that the order of samples is none."""
    if (
        name in PACKAGES and find_spec(PACKAGES[name]) is None
    ):  # importing Lightning would change the environment
        pytest.skip(f"{PACKAGES[name]} is not installed")
    before, after = PAGES[name]
    for file in (before, after, "plain.py"):
        shutil.copy(EXAMPLES / file, tmp_path)
    flags = ("--devices", 2) * (name == "lightning")
    script = run(
        "run", "--nproc", 2, before, *flags, "--epochs", STEPS, "--batch-size", 720, cwd=tmp_path
    )
    assert script.returncode == 0, script.stderr
    words = (after, "--nproc", 2, "--epochs", STEPS, "--global-batch", 1440, "--run-dir", "after")
    job = run("train", *words, cwd=tmp_path)
    assert job.returncode == 0, job.stderr

    lines = map(json.loads, (tmp_path / "after" / "metrics.jsonl").read_text().splitlines())
    ours = [line["loss"] for line in lines if "loss" in line]
    theirs = [float(loss) for loss in A_LOSS.findall(script.stdout)]
    assert len(ours) == STEPS and ours[-1] < 0.9 * ours[0]
    assert theirs == pytest.approx(ours, rel=RELATIVE)
