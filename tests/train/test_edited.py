"""A resume says what has changed in the job file, and begins nothing anew where snapshots were
lost.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from processes import refused, run
from stepladder import InputError, Job
from stepladder.storage.run_dir import RunDir
from stepladder.storage.run_files import METRICS_FILE, SNAPSHOTS_FOLDER
from stepladder.train.job_edits import describe_edits, is_edited, read_optimizer_settings

JOB = """
from dataclasses import dataclass
import torch
from torch import nn
from stepladder import Job

@dataclass
class Config:
    epochs: int = 1
    global_batch: int = 16

def build(config):
    model, x = nn.Linear(4, 1), torch.ones(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Job(model, optimizer, lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])), (x,))
"""


@pytest.mark.ranks
def test_a_resume_after_an_edit_names_the_file_and_what_has_no_effect(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    first = run("train", job, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    second = run("train", job, "--epochs", 2, cwd=tmp_path)
    assert "has changed" not in second.stderr
    job.write_text(JOB.replace("lr=0.05", "lr=0.1"))
    edited = run("train", job, "--epochs", 3, cwd=tmp_path)
    assert edited.returncode == 0, edited.stderr
    assert "  job.py has changed since this run was started" in edited.stderr
    message = "lr of the optimizer is 0.1 in job.py, 0.05 in the snapshot: the snapshot's is used. HINT: --fresh"
    assert edited.stderr.count(message) == 1

    shutil.rmtree(tmp_path / "runs" / "job" / SNAPSHOTS_FOLDER)
    before = (tmp_path / "runs" / "job" / METRICS_FILE).read_bytes()
    refused(
        run("train", job, "--epochs", 4, cwd=tmp_path),
        "has no snapshot any more",
        "has 12 steps",
        "--fresh",
    )
    assert (tmp_path / "runs" / "job" / METRICS_FILE).read_bytes() == before
    assert run("train", job, "--epochs", 4, "--fresh", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("remaining", ["lock", "result.json", ""])
def test_lost_snapshots_are_noticed_by_what_is_left(remaining: str, tmp_path: Path) -> None:
    """Also where the run was killed, and has no result. A run that had none yet begins again."""
    run_dir = RunDir(tmp_path, 0.0)
    (tmp_path / METRICS_FILE).write_text('{"step": 89, "lr": 1.0}\n{"step": 90, "lr": 1.0}\n{"ste')
    if remaining == "lock":
        (tmp_path / SNAPSHOTS_FOLDER / "step_00000090").mkdir(parents=True)
        run_dir.heartbeat()
        shutil.rmtree(tmp_path / SNAPSHOTS_FOLDER)
    elif remaining:
        (tmp_path / remaining).write_text(json.dumps({"steps": 90}))
    run_dir.close()
    second = RunDir(tmp_path, 0.0)
    try:
        if remaining:
            with pytest.raises(
                InputError, match=f"no snapshot any more, and its {METRICS_FILE} has 90 steps"
            ):
                second.validate_snapshots_exist()
        else:
            second.validate_snapshots_exist()
    finally:
        second.close()


def job(schedule: bool, *groups: dict[str, Any]) -> Job:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in groups)
    parts = [
        {"params": list(part.parameters()), **group}
        for part, group in zip(model, groups, strict=True)
    ]
    optimizer = torch.optim.AdamW(parts)
    plan = torch.optim.lr_scheduler.StepLR(optimizer, 1) if schedule else None
    return Job(model, optimizer, lambda *_: None, torch.ones(1), schedule=plan)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("schedule", "built", "stored", "named"),
    [
        (False, [{"lr": 0.1}], [{"lr": 0.1}], []),
        (False, [{"lr": 0.1}], [{"lr": 0.05}], ["lr of the optimizer is 0.1"]),
        (
            False,
            [{"betas": (0.9, 0.99)}],
            [{"betas": [0.9, 0.99]}],
            [],
        ),  # as a snapshot may have them
        (False, [{"lr": torch.tensor(0.5)}], [{"lr": 0.5}], []),
        (
            True,
            [{"lr": 0.1, "eps": 1.0}],
            [{"lr": 0.05, "eps": 2.0}],
            ["eps of the optimizer is 1 in"],
        ),
        (
            False,
            [{}, {"weight_decay": 1.0}],
            [{}, {"weight_decay": 2.0}],
            ["weight_decay of the optimizer (gr"],
        ),
    ],
)
def test_what_the_snapshot_overrides_is_named(
    schedule: bool, built: list[dict[str, Any]], stored: list[dict[str, Any]], named: list[str]
) -> None:
    file = read_optimizer_settings(job(False, *built).optimizer)
    first, *lines = describe_edits("/there/job.py", job(schedule, *stored), file)
    assert "job.py has changed" in first
    assert len(lines) == len(named)
    for line, part in zip(lines, named, strict=True):
        assert part in line


def test_only_a_file_whose_hash_is_known_is_edited(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text("")
    assert is_edited({"environment": {"job_sha256": "0" * 64}}, str(file))
    assert not is_edited({"environment": {}}, str(file))  # of a run of an earlier version
    assert not is_edited(None, str(file))


@pytest.mark.slow
@pytest.mark.ranks
def test_an_edited_loss_is_no_lost_state_on_any_rank(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    flags = "--sync", "exact", "--nproc", 2, "--shard", "full"
    first = run("train", job, *flags, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    job.write_text(JOB.replace("(model(batch[0])", "(1.5 * model(batch[0])"))
    edited = run("train", job, *flags, "--epochs", 2, cwd=tmp_path)
    assert edited.returncode == 0, edited.stderr
