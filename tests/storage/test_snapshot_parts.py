"""A snapshot that several ranks write is complete when all parts are on disk, or absent."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from snapshots import kill_before_act, run_until_killed, save, whole_steps
from stepladder.core.errors import InputError
from stepladder.storage.snapshot_parts import PartWriter, note_path, write_part_and_note
from stepladder.storage.snapshot_slices import TensorSlice
from stepladder.storage.snapshot_store import Snapshots

WEIGHTS = torch.arange(12.0).view(4, 3)
STEP = "step_00000002"


def part(number: int) -> dict[str, TensorSlice]:
    return {"model/w": TensorSlice(WEIGHTS[2 * number : 2 * number + 2], 2 * number, [4, 3])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A snapshot of step 1."""
    save(Snapshots(tmp_path / "snapshots"), 1)
    return tmp_path / "snapshots"


def begun(folder: Path) -> tuple[Snapshots, Path]:
    """The first rank has begun one of step 2, and waits for two parts."""
    snapshots = Snapshots(folder)
    aside = Path(snapshots.begin(2))
    snapshots.save(2, nn.Identity(), {}, parts=2)
    return snapshots, aside


def test_it_counts_when_all_parts_are_on_disk(folder: Path) -> None:
    snapshots, aside = begun(folder)
    write_part_and_note(aside, 1, part(1))
    assert whole_steps(folder) == [1]
    write_part_and_note(aside, 0, part(0))
    snapshots.wait()
    result = Snapshots(folder).latest(report=pytest.fail)
    assert result is not None and torch.equal(result.tensors()["w"], WEIGHTS)
    assert not note_path(folder / STEP, 0).exists() and not note_path(folder / STEP, 1).exists()


def test_sharded_weights_are_restored_into_a_model_of_their_shape_alone(folder: Path) -> None:
    snapshots, aside = begun(folder)
    for number in (0, 1):
        write_part_and_note(aside, number, part(number))
    snapshots.wait()
    snapshot = Snapshots(folder).latest(report=pytest.fail)
    assert snapshot is not None
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4, 3))
    snapshot.restore_model(model)
    assert torch.equal(model.w, WEIGHTS)
    model.w = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(InputError, match=r"w is \[3, 4\] in the model and \[4, 3\]"):
        snapshot.restore_model(model)


def test_without_a_part_there_is_nothing(folder: Path) -> None:
    snapshots, aside = begun(folder)
    write_part_and_note(aside, 1, part(1))
    snapshots.end(timeout_s=0)
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    save(snapshots, 3)
    assert whole_steps(folder) == [1, 3]


def test_a_part_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    writer = PartWriter()
    writer.save(tmp_path / "gone", 0, part(0))
    assert writer.wait_for_errno() == errno.ENOENT
    writer.save(tmp_path, 0, part(0))
    assert writer.wait_for_errno() == 0 and note_path(tmp_path, 0).exists()


def test_the_folder_may_become_the_snapshot_as_soon_as_the_last_part_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = tmp_path / "aside"
    replace = Path.replace
    aside.mkdir()

    def then_the_first_rank_is_quicker(self: Path, target: Path) -> None:
        replace(self, target)
        if target == note_path(aside, 0):
            aside.rename(tmp_path / STEP)

    monkeypatch.setattr(Path, "replace", then_the_first_rank_is_quicker)
    writer = PartWriter()
    writer.save(aside, 0, part(0))
    assert writer.wait_for_errno() == 0 and note_path(tmp_path / STEP, 0).exists()


def test_a_part_is_of_the_moment_of_save(folder: Path) -> None:
    snapshots, aside = begun(folder)
    weights = WEIGHTS.clone()
    writers = [PartWriter(), PartWriter()]
    for number, writer in enumerate(writers):
        values = weights[2 * number : 2 * number + 2]
        writer.save(aside, number, {"model/w": TensorSlice(values, 2 * number, [4, 3])})
        values.zero_()
    snapshots.wait()
    result = Snapshots(folder).latest(report=pytest.fail)
    assert result is not None and torch.equal(result.tensors()["w"], WEIGHTS)


def write_all(folder: Path) -> None:
    """The first rank and the second one, in one process: it is killed at some act of one of their
    threads.
    """
    snapshots, aside = begun(folder)
    writers = [PartWriter(), PartWriter()]
    for number, writer in enumerate(writers):
        writer.save(aside, number, part(number))
    snapshots.wait()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks
@pytest.mark.parametrize("number", range(2, 30, 3))
def test_killed_before_any_act_the_older_one_is_left_or_a_whole_new_one(
    folder: Path, number: int
) -> None:
    run_until_killed(kill_before_act, number, write_all, folder)
    result = Snapshots(folder).latest(report=pytest.fail)
    assert result is not None and result.step == (2 if (folder / STEP).exists() else 1)
    assert result.step == 1 or torch.equal(result.tensors()["w"], WEIGHTS)
    assert {path.name for path in folder.iterdir()} <= {"step_00000001", STEP}, (
        "what it left is cleared"
    )
