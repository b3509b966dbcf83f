"""--init-from: a run begins with another one's weights, on any number of processes, also after a
stop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from processes import first_difference, refused, run, train

MLP = "mlp", "--sync", "exact", "--microbatch", 16
FROM = "--init-from", "runs/first"

pytestmark = pytest.mark.ranks


@pytest.fixture
def first(tmp_path: Path) -> str:
    """The weights' hash of a finished run in runs/first."""
    return train(*MLP, "--steps", 8, "--run-dir", "runs/first", cwd=tmp_path)["weights_sha256"]


def test_it_begins_with_the_other_one_s_weights(first: str, tmp_path: Path) -> None:
    done = run("train", *MLP, *FROM, "--lr", 0, "--steps", 1, "--json", cwd=tmp_path)
    assert json.loads(done.stdout.splitlines()[-1])["weights_sha256"] == first
    assert "  begins with the weights of runs/first/snapshots/step_00000008\n" in done.stderr


def test_the_bits_are_the_same_on_any_number_of_processes(first: str, tmp_path: Path) -> None:
    more = *MLP, "--seed", 1, "--steps", 6
    snapshot = "runs/first/snapshots/step_00000008"
    alone = train(*more, *FROM, "--run-dir", "runs/a", cwd=tmp_path)
    two = train(*more, "--init-from", snapshot, "--run-dir", "runs/b", "--nproc", 2, cwd=tmp_path)
    same = alone["weights_sha256"] == two["weights_sha256"]
    assert same, first_difference(tmp_path / "runs" / "a", tmp_path / "runs" / "b")
    assert alone["train_loss"] == two["train_loss"]
    assert (
        train(*more, "--run-dir", "runs/c", cwd=tmp_path)["weights_sha256"]
        != alone["weights_sha256"]
    )


def test_a_resumed_run_needs_the_other_one_no_more(first: str, tmp_path: Path) -> None:
    uninterrupted = train(*MLP, *FROM, "--steps", 6, "--run-dir", "runs/whole", cwd=tmp_path)
    train(*MLP, *FROM, "--steps", 4, "--run-dir", "runs/a", cwd=tmp_path)
    (tmp_path / "runs" / "first").rename(tmp_path / "gone")
    resumed = train(*MLP, *FROM, "--steps", 6, "--run-dir", "runs/a", cwd=tmp_path)
    assert (resumed["resumed_from_step"], resumed["weights_sha256"]) == (
        4,
        uninterrupted["weights_sha256"],
    )
    third = run("train", *MLP, "--steps", 6, "--run-dir", "runs/a", cwd=tmp_path)
    refused(third, "was started with init_from=runs/first", "--init-from runs/first to resume")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--init-from", "runs/none"), "runs/none has no good snapshot"),
        ((*FROM, "--hidden", 32), "is of another model"),
        (("--init-from", "/dev/null"), "has no good snapshot"),
        (("--init-from", "runs/first/snapshots"), "has no good snapshot"),
        (("--init-from", "weights"), "stepladder import weights JOB --run-dir"),
        (("--init-from", "x" * 300), "--init-from xxx"),
    ],
)
def test_what_cannot_be_begun_with_is_one_line_and_leaves_nothing(
    flags: tuple[Any, ...], problem: str, first: str, tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").touch()
    refused(run("train", *MLP, "--steps", 6, "--run-dir", "runs/a", *flags, cwd=tmp_path), problem)
    assert not (tmp_path / "runs" / "a").exists()
