"""From the command to the training step in four hops, counted on the real stack; the sum is one
file on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stepladder
from processes import train

PACKAGE = Path(stepladder.__file__).parent

# Its loss, and the hook on its gradient, leave the frames of the package that lie below them.
JOB = f"""
import json, os, sys
from dataclasses import dataclass
from pathlib import Path
import torch
from stepladder import Job
from stepladder.train.comm import Comm

def frames():
    frame, found = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith({str(PACKAGE) + "/"!r}):
            found.append([frame.f_code.co_filename[len({str(PACKAGE) + "/"!r}):], frame.f_code.co_name])
        frame = frame.f_back
    return found[::-1]

def leave(name):
    path = Path(os.environ["FRAMES"]) / f"{{name}}-{{os.environ.get('RANK', 0)}}.json"
    path.write_text(json.dumps(frames()))

@dataclass
class Config:
    seed: int = 0

def loss(model, batch):
    leave("loss")
    return model(batch[0]).square().sum(), len(batch[0])

reduce = Comm.all_reduce

def all_reduce(comm, tensor):
    if ["train/trainer.py", "_reduce"] in frames():  # not the one that adds up what is recorded
        leave("sum")
    return reduce(comm, tensor)

Comm.all_reduce = all_reduce

def build(config):
    model = torch.nn.Linear(3, 1)
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, train_data=(torch.ones(8, 3),))
"""


def stack(folder: Path, name: str, rank: int = 0) -> list[tuple[str, str]]:
    return [
        (file, function)
        for file, function in json.loads((folder / f"{name}-{rank}.json").read_text())
    ]


@pytest.fixture
def trained(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    options = ("--global-batch", 8, "--steps", 1, "--nproc", request.param, "--sync", "manual")
    train("job.py", *options, cwd=tmp_path, env={"FRAMES": str(tmp_path)})
    return tmp_path


@pytest.mark.ranks
@pytest.mark.parametrize("trained", [1], indirect=True)
def test_one_process_goes_from_the_command_to_the_step_in_four_hops(trained: Path) -> None:
    frames = stack(trained, "loss")
    first = frames.index(("cli/train.py", "command"))
    assert frames[first:] == [
        ("cli/train.py", "command"),
        ("launcher/entry.py", "start"),
        ("train/job_runner.py", "train_file"),
        ("train/trainer.py", "fit"),
        ("train/trainer.py", "step"),
        ("train/trainer.py", "_compute_gradient"),
        ("train/trainer.py", "_run_passes"),
        ("train/trainer.py", "_run_pass"),
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("trained", [2], indirect=True)
def test_a_rank_takes_four_hops_and_the_sum_of_gradients_is_in_the_fifth_file(
    trained: Path,
) -> None:
    for rank in (0, 1):
        frames = stack(trained, "loss", rank)
        start = ("rank/lifecycle.py", "run_rank")
        assert frames[frames.index(start) :] == [
            start,
            ("launcher/entry.py", "train_rank"),
            ("train/job_runner.py", "train_file"),
            ("train/trainer.py", "fit"),
            ("train/trainer.py", "step"),
            ("train/trainer.py", "_compute_gradient"),
            ("train/trainer.py", "_run_passes"),
            ("train/trainer.py", "_run_pass"),
        ]
        below = stack(trained, "sum", rank)
        files = list(dict.fromkeys(file for file, _ in below[below.index(start) + 1 :]))
        assert [file for file in files if "sync" not in file] == [
            "launcher/entry.py", "train/job_runner.py", "train/trainer.py",
        ]  # fmt: skip
        assert below[-1][0].startswith("train/sync/")
        assert len({"cli/train.py", *files} - {"train/sync/base.py"}) <= 5
