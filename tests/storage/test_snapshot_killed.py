"""A writer killed at any moment leaves complete snapshots, and never fewer than before."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from snapshots import kill_before_act, model_of, run_until_killed, save, whole_steps
from stepladder.storage.snapshot import MODEL_FILE
from stepladder.storage.snapshot_store import Snapshots

NUMBERS = range(
    1, 19
)  # of acts while a snapshot is written and an older one is pruned: two more than there are
FEWER_NUMBERS = [
    pytest.param(number, marks=() if number % 3 == 0 else pytest.mark.slow) for number in NUMBERS
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Snapshots of step 1 and 2, beside which the writer is killed."""
    for step in (1, 2):
        save(Snapshots(tmp_path / "snapshots"), step)
    return tmp_path / "snapshots"


def save_and_end(folder: Path, step: int) -> None:
    save(Snapshots(folder, keep=1), step)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_prune(folder: Path, step: int) -> None:
    def half_way(path: Path, **_: Any) -> None:
        if path.exists():
            (path / MODEL_FILE).unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = half_way  # type: ignore[assignment]
    save(Snapshots(folder, keep=1), step)


@pytest.mark.ranks
@pytest.mark.parametrize("number", FEWER_NUMBERS)
def test_a_writer_killed_before_any_act_leaves_the_older_snapshot_or_a_whole_new_one(
    folder: Path, number: int
) -> None:
    run_until_killed(kill_before_act, number, save_and_end, folder, 3)
    published = (folder / "step_00000003").exists()
    assert published or number < NUMBERS[-2], "the last ones are tried after all is done"
    result = Snapshots(folder).latest(report=pytest.fail)
    assert result is not None
    result.restore_model(model := model_of(0))
    assert (result.step, model.weight[0, 0].item()) == ((3, 3.0) if published else (2, 2.0))
    assert result.step in whole_steps(folder)
    later = Snapshots(folder, keep=1)
    save(later, 3)
    assert [path.name for path in folder.iterdir()] == ["step_00000003"], (
        "what the killed one left is cleared"
    )
    assert whole_steps(folder) == [3]


@pytest.mark.ranks
@pytest.mark.parametrize("number", FEWER_NUMBERS)
def test_a_writer_killed_before_any_act_while_it_replaces_a_step_leaves_one_of_that_step(
    folder: Path, number: int
) -> None:
    run_until_killed(kill_before_act, number, save_and_end, folder, 2)
    result = Snapshots(folder).latest(report=pytest.fail)
    assert result is not None and result.step == 2
    assert result.step in whole_steps(folder)


@pytest.mark.ranks
def test_a_writer_killed_while_it_prunes_leaves_no_half_snapshot(folder: Path) -> None:
    run_until_killed(kill_in_prune, folder, 3)
    assert 3 in whole_steps(folder), "a half-removed snapshot counts as one"


@pytest.mark.parametrize("new_is_there", [False, True])
def test_killed_between_the_two_renames_of_a_replacement_one_of_both_is_found(
    folder: Path, new_is_there: bool
) -> None:
    step = folder / "step_00000002"
    step.rename(folder / "step_00000002.old")
    if new_is_there:
        shutil.copytree(folder / "step_00000002.old", step)
    result = Snapshots(folder).latest(report=pytest.fail)
    assert result is not None and result.step == 2
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000002"]
