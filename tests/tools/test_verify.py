"""`verify` proves that a correct job is equal on any number of processes, or names its defect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from processes import JOBS, refused, run
from stepladder import InputError, Plan, Settings
from stepladder.cli import cli
from stepladder.tools.verify.proof import Proof, describe_proof, prove
from stepladder.tools.verify.trial import choose_num_steps, compute_last_step
from stepladder.train.job_file import load_stored_job

pytestmark = pytest.mark.ranks

JOB = """
import os
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d as c10d  # which tells a job how many ranks there are

from stepladder import Job

RANK = int(os.environ.get("RANK", 0))

@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 16
    lr: float = 0.05
    seed: int = 0
    plant: str = ""

class Net(nn.Module):
    def __init__(self, plant):
        super().__init__()
        self.plant, self.passes = plant, 0
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.register_buffer("calls", torch.zeros(()))
        if plant == "norm":
            self.layers.insert(1, nn.BatchNorm1d(8))

    def forward(self, x):
        self.passes += 1
        if self.plant == "buffer" or (self.plant == "late buffer" and self.passes > 10):
            self.calls += 1
        return self.layers(x)

def build(config):
    WORLD_SIZE = c10d.get_world_size() if c10d.is_initialized() else 1
    data_seed = 7 + (config.plant == "data") * WORLD_SIZE
    x = torch.randn(72, 6, generator=torch.Generator().manual_seed(data_seed))
    offset = (config.plant == "start") * WORLD_SIZE + (config.plant == "rank seed") * RANK
    torch.manual_seed(config.seed + offset)
    model = Net(config.plant)
    noise = torch.Generator().manual_seed(RANK if config.plant == "noise" else 3)

    def loss(model, batch):
        x, y = batch
        assert config.plant != "crash"
        if config.plant == "clock":
            x = x + time.time() % 1
        elif config.plant == "entropy":
            x = x + int.from_bytes(os.urandom(4), "little") / 2**32
        elif config.plant == "threads":
            torch.set_num_threads(WORLD_SIZE)
            x = x * (1 + WORLD_SIZE / 1000)
        elif config.plant in ("noise", "state"):
            x = x + torch.randn(x.shape, generator=noise)
        total = F.mse_loss(model(x), y, reduction="sum")
        if config.plant == "mean":
            return total / len(x), 1
        if config.plant == "count":
            return total / len(x), 16 // WORLD_SIZE
        if config.plant == "odd update" and RANK == 1:
            model.layers[0].bias.data[0] += 1e-3
        return total, len(x)

    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    return Job(model, optimizer, loss, (x, x.sum(1, keepdim=True)))
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of 10 steps, the 5th and 10th of them short, with the defect Config.plant."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the launcher sets it where it is not, for good
    path = tmp_path / "planted.py"
    path.write_text(JOB)
    return path


def called(*args: object) -> tuple[int, list[str]]:
    """A command in this process, where the server that ranks are forked from is warm: exit code,
    lines.
    """

    done = CliRunner().invoke(cli, list(map(str, args)), standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, done.stdout.splitlines()


def proved(job: Path, plant: str, sizes: list[int], **settings: Any) -> Proof:
    return prove(
        job, {"plant": plant}, Settings(job.parent, **{"sync": "exact", **settings}), sizes, 6
    )


def test_a_sound_job_is_equal_on_all_sizes_and_through_resumes(job: Path) -> None:
    done = run("verify", job, "--json", "--epochs", 1, cwd=job.parent)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (
        called(
            "train",
            job,
            "--sync",
            "exact",
            "--nproc",
            2,
            "--epochs",
            1,
            "--run-dir",
            job.parent / "run",
        )[0]
        == 0
    )
    trained = json.loads((job.parent / "run" / "result.json").read_text())
    assert result == {
        "schema": 1, "equal": True, "sizes": [1, 2, 3], "resumed": [[3, 1], [1, 2]], "steps": 5,
        "first_difference": None, "weights_sha256": trained["weights_sha256"],
    }  # fmt: skip
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    documented = re.findall(
        r"^\| `(\w+)`", page.split("\n## verify\n")[1].split("\n## ")[0], re.MULTILINE
    )
    assert documented == list(result), "docs/json.md has other keys"


PLANTED = {  # plant: settings, sizes, (step, kind, sizes) of the difference, cause
    "noise": ({}, [1, 2], (1, "loss", [1, 2]), "a rank-seeded random number"),
    "state": ({}, [1, 2], (1, "loss", [1, 2]), "state kept from one call"),
    "clock": ({}, [1, 2], (1, "loss", [1, 1]), "a non-deterministic operation"),
    "entropy": ({}, [2, 1], (1, "loss", [2, 2]), "a non-deterministic operation"),
    "buffer": ({}, [1, 2], (1, "buffer", [1]), "forward changes the buffer calls"),
    "start": ({}, [1, 2], (0, "parameter", [1, 2]), "weights initialised by"),
    "data": ({}, [1, 2], (1, "loss", [1, 2]), "a rank-seeded random number in the data"),
    "count": (
        {},
        [1, 3],
        (1, "loss", [1, 3]),
        "a mean of means: for one batch the loss counts 5 and 16",
    ),
    "mean": (
        {"sync": "ddp"},
        [1, 3],
        (1, "loss", [1, 3]),
        "a mean of means: the loss of a batch is not the sum",
    ),
    "norm": ({"sync": "ddp"}, [1, 2], (1, "loss", [1, 2]), "a batch-norm"),
    "threads": (
        {},
        [1, 2],
        (1, "loss", [1, 2]),
        "another thread count: ranks compute with 1 and 2",
    ),
    "odd update": ({}, [1, 2], (1, "parameter", [2]), "changes the weight layers.0.bias"),
}
FEW = "data", "buffer"  # the others are tested with the slow tests


@pytest.mark.parametrize(
    "plant",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in PLANTED],
)
def test_what_is_planted_is_found_and_its_cause_named(job: Path, plant: str) -> None:
    settings, sizes, location, cause = PLANTED[plant]
    proof = proved(job, plant, sizes, **settings)
    difference = proof.difference
    assert difference is not None
    assert cause in difference.cause
    assert (difference.step, difference.kind, difference.sizes) == location
    assert cause in describe_proof(proof, exact=True)


def test_a_buffer_that_changes_late_is_named_with_its_step(job: Path) -> None:
    """On two processes, of which each makes four passes per step."""
    proof = proved(job, "late buffer", [2, 1])
    difference = proof.difference
    assert difference is not None and (
        difference.step,
        difference.kind,
        difference.tensor,
        difference.sizes,
    ) == (3, "buffer", "calls", [2])
    assert "forward changes the buffer calls" in describe_proof(
        proof, exact=True
    ) and proof.sizes == [2]


@pytest.mark.slow
def test_state_outside_the_snapshot_is_found_by_the_resume(job: Path) -> None:
    difference = proved(job, "state", [1]).difference
    assert (
        difference is not None
        and (difference.step, difference.sizes) == (4, [1, 1])
        and "state kept" in difference.cause
    )


@pytest.mark.parametrize(
    "proof, sentence",
    [
        (
            Proof([1, 2, 3], [[3, 1], [1, 2]], 12, None, ""),
            "in 12 steps on 1, 2 and 3 processes, resumed 3 > 1 > 2",
        ),
        (Proof([1], [[1, 1]], 2, None, ""), "in 2 steps on 1 process, resumed 1 > 1"),
        (Proof([2], [], 1, None, ""), "in 1 steps on 2 processes"),
    ],
)
def test_the_verdict_is_one_sentence(proof: Proof, sentence: str) -> None:
    assert (
        describe_proof(proof, exact=True)
        == f"equal: every bit of every loss and weight, {sentence}"
    )
    assert (
        describe_proof(proof, exact=False)
        == f"equal: losses within 1e-05, weights within 0.001, {sentence}"
    )


@pytest.mark.slow
def test_weights_that_training_makes_equal_are_no_difference(job: Path) -> None:
    """Each rank initialises its weights; training broadcasts those of rank 0, but in exact mode."""
    assert proved(job, "rank seed", [1, 2], sync="ddp", microbatch=4).difference is None


@pytest.mark.slow
def test_a_run_directory_is_verified_with_its_settings(job: Path) -> None:
    run_dir = job.parent / "noisy"
    flags = ("--microbatch", 4, "--lr", 0.07, "--plant", "noise", "--nproc", 2)
    assert called("train", job, *flags, "--run-dir", run_dir, "--steps", 1)[0] == 0
    path, config, settings = load_stored_job(run_dir)
    assert (path, config["lr"], config["plant"]) == (job, 0.07, "noise")
    assert (settings["microbatch"], settings["sync"]) == (4, "ddp")
    code, (*table, sentence) = called(
        "verify", run_dir, "--nproc", "2,1", "--seed", 0, "--trust-job-file"
    )
    assert code == 1
    assert [line.split()[0] for line in table] == ["processes", "2", "1"]
    assert sentence.startswith("different: loss at step 1, on 2 and 1 processes, by ")
    assert "rank-seeded" in sentence
    assert {path.name for path in job.parent.iterdir()} - {"__pycache__"} == {"planted.py", "noisy"}


@pytest.mark.slow
def test_a_run_directory_s_job_file_is_run_only_if_its_user_has_trained_it(tmp_path: Path) -> None:
    """Whoever hands over the directory may have chosen the file, also one beside it."""
    job = tmp_path / "theirs" / "job.py"
    run_dir = tmp_path / "mine" / "run"
    job.parent.mkdir()
    code = (JOBS / "secret.py").read_text() + "\nPath('ran').touch()\n"
    job.write_text(code)
    run("train", job, "--steps", 1, "--run-dir", run_dir, cwd=tmp_path)
    verify = ("verify", "run", "--nproc", 1, "--steps", 2)
    hint = "stepladder verify run --trust-job-file"
    done = run(*verify, cwd=run_dir.parent)  # their own run, from wherever
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == f"stepladder: runs {job}, which run/config.json names"
    for mark in tmp_path.rglob("ran"):
        mark.unlink()
    config = json.loads((run_dir / "config.json").read_text())
    foreign = (
        "run names a job file that you have not trained as it is now, and verify would run it: "
    )
    for path in (
        run_dir / "job.py",
        run_dir.parent / "job.py",
    ):  # the same bytes, beside what they may import
        path.write_text(code)
        (run_dir / "config.json").write_text(json.dumps(config | {"job_file": str(path)}))
        refused(run(*verify, cwd=run_dir.parent), f"{foreign}{path}", hint)
    (run_dir / "config.json").write_text(json.dumps(config))
    job.write_text(f"{code}# edited\n")
    refused(run(*verify, cwd=run_dir.parent), f"{foreign}{job}", hint)
    assert not list(tmp_path.rglob("ran"))
    assert run(*verify, "--trust-job-file", cwd=run_dir.parent).returncode == 0
    refused(run("verify", "mlp", "--trust-job-file", cwd=tmp_path), "mlp is not a run directory")


def test_bad_input_is_named(job: Path) -> None:
    refused(
        run("verify", job, "--nproc", "1,x", "--json", cwd=job.parent), "--nproc 1,x is not a list"
    )
    with pytest.raises(InputError, match="--steps 1 leaves no step to resume at"):
        prove(job, {}, Settings(job.parent), [1], 1)
    with pytest.raises(InputError, match="--nproc 1000000 on a machine"):
        proved(job, "", [1, 10**6])
    with pytest.raises(InputError, match="9 processes for 8 microbatches"):
        proved(job, "", [9, 1])
    with pytest.raises(InputError, match="the batch grows with the processes"):
        proved(job, "", [1], batch_per_rank=4)
    with pytest.raises(InputError, match="training on 1 process ended with exit code 1"):
        proved(job, "crash", [1])


def test_a_folder_that_is_no_run_directory_is_named(tmp_path: Path) -> None:
    refused(run("verify", tmp_path, cwd=tmp_path), "is unknown")
    definition = '{"definition": {"recipe": "mlp"}, "config":'
    for text in (
        "{}",
        '{"definition": {"recipe": "mlp", "microbatch": {}}, "config": {}}',
        f'{definition} {{"lr": []}}}}',
        f'{definition} {{"seed": null}}}}',
        f'{definition} {{"rate": 1}}}}',
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=r"config\.json is damaged"):
            load_stored_job(tmp_path)


def test_about_a_dozen_steps_and_a_short_last_batch_where_it_is_near() -> None:
    def steps(samples: int, num_steps: int, requested: int | None = None) -> int:
        return choose_num_steps(Plan(samples, 10, 5), num_steps, requested)

    assert steps(1000, 500) == 12  # 100 steps per epoch
    assert steps(195, 500) == 21  # past the 20th, which is short
    assert steps(35, 500) == 12
    assert steps(35, 8) == 8
    assert steps(1000, 500, 30) == 30 and steps(35, 8, 30) == 8
    assert [compute_last_step(12, part, 3) for part in (1, 2, 3)] == [4, 8, 12]
    assert [compute_last_step(4, part, 3) for part in (1, 2, 3)] == [1, 2, 4]
