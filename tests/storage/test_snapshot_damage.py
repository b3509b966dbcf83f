"""Damaged files are named and the snapshot before them used; what cannot be written is said and
leaves nothing.
"""

from __future__ import annotations

import enum
import errno
import io
import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ranks import run_ranks
from snapshots import model_of, save, whole_steps
from stepladder.core.errors import InputError
from stepladder.storage.run_files import MANIFEST_FILE
from stepladder.storage.snapshot import MODEL_FILE, STATE_FILE, read_newest_snapshot, read_snapshot
from stepladder.storage.snapshot_store import Snapshots

FILES = (MODEL_FILE, STATE_FILE, MANIFEST_FILE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Snapshots of step 1 and 2, to be damaged."""
    for step in (1, 2):
        save(Snapshots(tmp_path / "snapshots"), step)
    return tmp_path / "snapshots"


def truncate(path: Path, max_kept: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: max_kept if max_kept >= 0 else len(data) + max_kept])


def flip(path: Path, where: float, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1 << bit
    path.write_bytes(data)


def latest_with_reports(folder: Path) -> tuple[int, list[str]]:
    reports: list[str] = []
    result = Snapshots(folder).latest(reports.append)
    assert result is not None
    return result.step, reports


def test_the_newest_good_snapshot_is_found_and_nothing_is_tidied_up(folder: Path) -> None:
    truncate(folder / "step_00000002" / MODEL_FILE, 100)
    assert read_newest_snapshot(folder.parent).step == 1
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000002"]
    truncate(folder / "step_00000001" / STATE_FILE, 0)
    with pytest.raises(
        InputError, match=r"has no good snapshot \(step_00000001 is damaged: state.pt: 0 bytes"
    ):
        read_newest_snapshot(folder.parent)


def test_a_file_that_grew_to_a_terabyte_is_not_read(folder: Path) -> None:
    os.truncate(folder / "step_00000002" / MODEL_FILE, 1 << 40)
    for complete in (True, False):
        assert read_newest_snapshot(folder.parent, complete).step == 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("max_kept", [0, 100, -1])
def test_a_truncated_file_is_reported_by_name_and_the_snapshot_before_it_used(
    folder: Path, name: str, max_kept: int
) -> None:
    truncate(folder / "step_00000002" / name, max_kept)
    step, reports = latest_with_reports(folder)
    assert step == 1
    assert len(reports) == 1 and "step_00000002 is damaged" in reports[0] and name in reports[0]
    assert name == "manifest.json" or "bytes instead of" in reports[0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.0, 0.03, 0.5, 0.97, 1.0])
def test_a_flipped_bit_is_reported_by_file_and_the_snapshot_before_it_used(
    folder: Path, name: str, where: float
) -> None:
    flip(folder / "step_00000002" / name, where, bit=2)
    step, reports = latest_with_reports(folder)
    assert step == 1
    assert len(reports) == 1 and name in reports[0]


@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_of_a_manifest_goes_unseen(folder: Path, bit: int) -> None:
    path = folder / "step_00000002"
    complete = (path / "manifest.json").read_bytes()
    for position in range(len(complete)):
        changed = bytearray(complete)
        changed[position] ^= 1 << bit
        (path / "manifest.json").write_bytes(changed)
        try:
            read_snapshot(path)
        except Exception as error:
            assert type(error).__name__ == "DamagedSnapshot", f"byte {position}: {error!r}"
        else:
            pytest.fail(f"byte {position} of {complete!r} may change unseen")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_reported_by_name(folder: Path, name: str) -> None:
    (folder / "step_00000002" / name).unlink()
    step, reports = latest_with_reports(folder)
    assert step == 1
    assert name in reports[0]


def test_a_manifest_whose_keys_come_in_another_order_is_the_same_one(folder: Path) -> None:
    newest = max(folder.glob("step_*"))
    stored = json.loads((newest / MANIFEST_FILE).read_text())
    (newest / MANIFEST_FILE).write_text(json.dumps(dict(reversed(stored.items()))))
    assert read_snapshot(newest).manifest == {
        name: stored[name] for name in stored if name != "seal"
    }


def test_a_manifest_that_is_other_json_is_damaged(folder: Path) -> None:
    (folder / "step_00000002" / "manifest.json").write_text("[1]")
    assert latest_with_reports(folder)[0] == 1


def test_a_damaged_snapshot_is_kept_aside_and_counts_no_more(folder: Path) -> None:
    truncate(folder / "step_00000002" / "state.pt", 10)
    latest_with_reports(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00000001",
        "step_00000002.damaged",
    ]
    save(Snapshots(folder, keep=1), 2)
    assert whole_steps(folder) == [2]


def test_if_all_are_damaged_every_start_says_so_and_none_begins_anew(folder: Path) -> None:
    for step in (1, 2):
        truncate(folder / f"step_{step:08d}" / "model.safetensors", 10)
    for _start in ("first", "second"):
        with pytest.raises(InputError, match=r"all 2 snapshots in .* are damaged.*--fresh"):
            Snapshots(folder).latest(lambda _: None)


# -- not writable ----------------------------------------------------------------------------------


def save_on_a_full_disk(_comm: object, folder: Path, limit: int) -> str:
    """The InputError's text. RLIMIT_FSIZE fails a write as a full disk does, after some of its
    bytes.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    snapshots = Snapshots(folder)
    snapshots.save(3, nn.Linear(300, 200), {"numbers": torch.zeros(100_000)})
    try:
        snapshots.wait()
    except InputError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(100_000, marks=pytest.mark.slow),
        300_000,
    ],
    ids=["no byte", "within the model", "within the state"],
)
def test_a_full_disk_is_an_input_error_and_leaves_the_older_snapshots_and_nothing_half_written(
    folder: Path, limit: int
) -> None:
    (text,) = run_ranks(save_on_a_full_disk, 1, folder, limit)
    assert f"snapshot in {folder} could not be written: {os.strerror(errno.EFBIG)}" in text
    assert "HINT" in text
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000002"]
    assert whole_steps(folder) == [1, 2]


def test_a_place_that_cannot_be_written_is_an_input_error_at_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    snapshots = Snapshots(tmp_path / "file" / "snapshots")
    snapshots.save(1, model_of(1), {})
    with pytest.raises(InputError, match="could not be written: Not a directory"):
        snapshots.wait()
    snapshots.wait()


def test_an_error_of_one_write_is_raised_before_the_next_one_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    snapshots = Snapshots(tmp_path / "file")
    snapshots.save(1, model_of(1), {})
    with pytest.raises(InputError, match="could not be written"):
        snapshots.save(2, model_of(2), {})


@pytest.mark.parametrize("calls_allowed", [0, 1], ids=["before writing", "before publishing"])
def test_a_guard_that_refuses_is_heard_and_nothing_is_published(
    folder: Path, calls_allowed: int
) -> None:
    calls: list[int] = []

    def guard() -> None:
        calls.append(1)
        if len(calls) > calls_allowed:
            raise InputError("attempt 1 lost the directory to attempt 2", "look who writes there")

    snapshots = Snapshots(folder, guard=guard)
    snapshots.save(3, model_of(3), {})
    with pytest.raises(InputError, match=r"^attempt 1 lost the directory"):
        snapshots.wait()
    assert whole_steps(folder) == [1, 2]


def test_a_state_that_cannot_be_read_back_is_refused_by_name_before_anything_is_written(
    folder: Path,
) -> None:
    with pytest.raises(
        InputError, match="state state/not storable is a function, which cannot be read back safely"
    ):
        Snapshots(folder).save(3, model_of(3), {"not storable": lambda: None})
    with pytest.raises(InputError, match="state state/named is a Named, which cannot be read back"):
        Snapshots(folder).save(3, model_of(3), {"named": Named(1, torch.ones(2))})
    for value in (np.float32(1.5), Phase.WARM, {Phase.WARM: 1}):
        with pytest.raises(InputError, match=r"is a (float32|Phase), which cannot be read back"):
            Snapshots(folder).save(3, model_of(3), {"value": value})
    assert whole_steps(folder) == [1, 2]
    snapshots = Snapshots(folder)
    snapshots.save(3, model_of(3), {"value": np.float64(1.5), (1, "a"): np.int32(2)})
    snapshots.wait()
    assert read_snapshot(folder / "step_00000003").state() == {"value": 1.5, (1, "a"): 2}


class Phase(enum.IntEnum):
    """A value that looks like a number."""

    WARM = 0


class Named(NamedTuple):
    """A value that torch.load refuses to read."""

    number: int
    tensor: torch.Tensor


class RunsCode:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_a_state_that_would_run_code_is_not_read(folder: Path, tmp_path: Path) -> None:
    """Its manifest may hold the right hash: whoever made the folder made both."""
    snapshot = read_newest_snapshot(tmp_path)
    state = io.BytesIO()
    torch.save({"value": RunsCode(tmp_path / "made")}, state)
    changed = replace(snapshot, files={**snapshot.files, STATE_FILE: state.getvalue()})
    with pytest.raises(UnpicklingError):
        changed.state()
    assert not (tmp_path / "made").exists()


def test_the_newest_snapshot_comes_with_its_weights_unless_they_are_not_wanted(
    folder: Path, tmp_path: Path
) -> None:
    assert read_newest_snapshot(tmp_path).tensors()
    assert MODEL_FILE not in read_newest_snapshot(tmp_path, with_model=False).files
