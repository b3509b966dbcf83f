"""A run directory of an earlier version resumes to the bits that the earlier version would reach.

The fixture was written by two processes and killed after step 26 of 40, with snapshots of steps 10
and 20.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import audited, refused, run, train
from stepladder.train.determinism import describe_machine

BEFORE = Path(__file__).parent.parent / "fixtures" / "run_of_version_0_1"
FLAGS = ("mlp", "--sync", "exact", "--microbatch", 16, "--steps", 40)
WEIGHTS = "4d81ab90006027c5ff8d2a9dacec4decf9c9aadbe208592382f5b522c07efa65"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BEFORE, tmp_path / "run"))


def edit_config(run_dir: Path, **definition: str) -> None:
    config = json.loads((run_dir / "config.json").read_text())
    config["definition"] |= definition
    (run_dir / "config.json").write_text(json.dumps(config))


def losses(run_dir: Path) -> list[float]:
    return [
        row["loss"]
        for text in (run_dir / "metrics.jsonl").open()
        if "lr" in (row := json.loads(text))
    ]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "snapshots" / "step_00000040" / "model.safetensors")


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_of_the_version_before_is_resumed_to_the_same_bits(copy: Path, nproc: int) -> None:
    """The bits depend on the kind of processor, and `train` refuses to resume on another one.

    On another one, the test changes the stored processor to this one, and compares losses and
    weights to within 1e-4. One step more or less of the remaining 20 would change them by 1e-2.
    """
    folder_now = describe_machine(torch.device("cpu"))
    same = json.loads((copy / "config.json").read_text())["definition"]["machine"] == folder_now
    edit_config(copy, machine=folder_now)
    result = train(*FLAGS, "--nproc", nproc, "--run-dir", copy, cwd=copy.parent)
    assert (result["resumed_from_step"], result["steps"], result["stopped"]) == (20, 40, False)
    audit = audited(copy)
    assert (audit["ok"], audit["attempts"], audit["lost"]) == (True, 2, 0), audit
    if same:
        assert result["weights_sha256"] == WEIGHTS
        return
    train(*FLAGS, "--run-dir", "unbroken", cwd=copy.parent)
    unbroken = copy.parent / "unbroken"
    assert losses(copy) == pytest.approx(losses(unbroken), rel=1e-4)
    torch.testing.assert_close(weights(copy), weights(unbroken), rtol=1e-4, atol=1e-4)


@pytest.mark.ranks
def test_a_run_of_a_later_version_is_refused_by_every_command(copy: Path) -> None:
    """The message is one sentence, and no file but the lock file is changed."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"schema": 2, "definition": "elsewhere"}))
    before = content(copy)
    for command in (
        ("train", *FLAGS, "--run-dir"),
        ("audit",),
        ("report",),
        ("watch",),
        ("verify",),
    ):
        line = refused(
            run(*command, copy, cwd=copy.parent),
            "config.json was written by a newer stepladder",
            "its schema is 2, this one knows 1",
            "pip install --upgrade stepladder, or another --run-dir",
        )
        assert str(copy) in line
        assert content(copy) == before, command


@pytest.mark.ranks
def test_a_run_of_a_later_version_may_be_moved_aside(copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({"schema": 2}))
    result = train(*FLAGS[:-1], 1, "--fresh", "--run-dir", copy, cwd=copy.parent)
    assert (result["resumed_from_step"], result["steps"]) == (0, 1)
    assert json.loads((copy.with_name("run.old-1") / "config.json").read_text()) == {"schema": 2}


def content(run_dir: Path) -> dict[str, bytes]:
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}
