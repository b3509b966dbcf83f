"""A writer killed at any moment leaves snapshots that are whole, and never fewer than there were."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from processes import SECONDS
from ranks import CONTEXT
from snapshots import model_of, save, whole_steps
from stepladder.storage.snapshot import MANIFEST, MODEL, STATE, Snapshots

STAGES = [*(f"before {name}" for name in (MODEL, STATE, MANIFEST)), "before rename", "before prune", "done"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Snapshots of step 1 and 2, beside which the writer is killed."""
    for step in (1, 2):
        save(Snapshots(tmp_path / "snapshots"), step)
    return tmp_path / "snapshots"


def kill_at(folder: Path, step: int, stage: str) -> None:
    def die(now: str) -> None:
        if now == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    save(Snapshots(folder, keep=1, stage=die), step)


def kill_before_move(folder: Path, step: int, number: int) -> None:
    """Killed before the number-th time that something is renamed or removed, or at the end."""
    moves = []

    def counting(move: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            moves.append(move)
            if len(moves) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return move(*args, **kwargs)

        return counted

    Path.rename, shutil.rmtree = counting(Path.rename), counting(shutil.rmtree)  # type: ignore[method-assign, assignment]
    save(Snapshots(folder, keep=1), step)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_prune(folder: Path, step: int) -> None:
    def half_way(path: Path, **_: Any) -> None:
        if path.exists():
            (path / MODEL).unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = half_way  # type: ignore[assignment]
    save(Snapshots(folder, keep=1), step)


def run_until_killed(function: Any, *args: Any) -> None:
    process = CONTEXT.Process(target=function, args=args)
    process.start()
    process.join(SECONDS)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == -signal.SIGKILL, f"the writer should have killed itself, its exit code is {code}"


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_a_writer_killed_at_any_stage_leaves_the_older_snapshot_or_a_whole_new_one(
    folder: Path, stage: str
) -> None:
    run_until_killed(kill_at, folder, 3, stage)
    published = STAGES.index(stage) > STAGES.index("before rename")
    found = Snapshots(folder).latest(report=pytest.fail)
    assert found is not None
    found.restore_model(model := model_of(0))
    assert (found.step, model.weight[0, 0].item()) == ((3, 3.0) if published else (2, 2.0))
    assert found.step in whole_steps(folder)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_a_later_run_clears_up_after_a_killed_writer_and_saves_the_same_step(folder: Path, stage: str) -> None:
    run_until_killed(kill_at, folder, 3, stage)
    later = Snapshots(folder, keep=1)
    later.latest(report=pytest.fail)
    save(later, 3)
    assert [path.name for path in folder.iterdir()] == ["step_00000003"]
    assert whole_steps(folder) == [3]


@pytest.mark.ranks
@pytest.mark.parametrize("number", range(1, 7))
def test_a_writer_killed_before_any_move_while_it_replaces_a_step_leaves_one_of_that_step(
    folder: Path, number: int
) -> None:
    run_until_killed(kill_before_move, folder, 2, number)
    found = Snapshots(folder).latest(report=pytest.fail)
    assert found is not None and found.step == 2
    assert found.step in whole_steps(folder)


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
    found = Snapshots(folder).latest(report=pytest.fail)
    assert found is not None and found.step == 2
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000002"]
