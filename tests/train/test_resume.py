"""Stopped at any step of any epoch and resumed, a run ends as if it had never stopped."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from contracts import check_resume, check_resume_twice
from processes import audited, started, train
from ranks import run_ranks
from stepladder import Comm, Job, Plan, Settings, Trainer
from stepladder.data.sources import Request, open_source
from stepladder.storage.audit import audit

CPU = torch.device("cpu")


class Noisy(Dataset):
    """Items with augmentation from all three generators."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
        return {
            "x": torch.cat([noise, torch.full((3,), index / 30)]),
            "y": torch.tensor([index / 15 - 1]),
        }


# -- the source ------------------------------------------------------------------------------------


class Reading:
    """Reads a plan's microbatches; the position is all that is kept."""

    plan = Plan(
        num_samples=30, global_batch=8, microbatch=4, seed=5
    )  # 4 steps per epoch, the last of 6

    def __init__(self, data: Any, num_workers: int, _name: str) -> None:
        self.data = data
        self.num_workers = num_workers
        self.position = 0
        self.read = b""

    def requests(self, until: int) -> Iterator[Request]:
        for step in range(self.position, until):
            for span in self.plan.microbatches(step):
                yield self.plan.epoch_of_step(step), self.plan.indices(step, span)

    def advance(self, until: int) -> None:
        source = open_source(self.data, CPU, self.plan.seed, self.num_workers)
        for indices, batch in source.batches(self.requests(until)):
            self.read += indices.tobytes() + batch["x"].numpy().tobytes()
        self.position = until

    def outcome(self) -> bytes:
        return self.read


@pytest.mark.parametrize(
    "data, num_workers",
    [
        ({"x": torch.rand(30, 3)}, 0),
        (Noisy(), 0),
        pytest.param(Noisy(), 2, marks=pytest.mark.ranks),
    ],
    ids=["tensors", "dataset", "dataset-2-workers"],
)
def test_a_source_resumed_at_any_step_gives_the_same_batches(data: Any, num_workers: int) -> None:
    check_resume(partial(Reading, data, num_workers), steps=8, stop_at=range(1, 8))


def test_items_do_not_depend_on_the_number_of_workers() -> None:
    reading = [Reading(Noisy(), workers, "") for workers in (0, 2)]
    for reader in reading:
        reader.advance(8)
    assert reading[0].outcome() == reading[1].outcome()


# -- the trainer -----------------------------------------------------------------------------------


def tiny_job(
    optimizer: str = "adam", per: str = "step", norm: bool = False, data: Any = None, wide: int = 16
) -> Job:
    """Dropout, an optimizer with state, a schedule, clipping, evaluation; built anew for each fit."""
    torch.manual_seed(1)
    x = torch.randn(30, 6)
    layers = [
        nn.Linear(6, wide),
        nn.BatchNorm1d(wide) if norm else nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(wide, 1),
    ]
    model = nn.Sequential(*layers)
    if optimizer == "adam":
        optim: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return Job(
        model,
        optim,
        squared_error,
        data or {"x": x, "y": x.sum(1, keepdim=True)},
        {"x": x, "y": x[:, :1]},
        lambda model, batch: {"error": squared_error(model, batch)},
        torch.optim.lr_scheduler.StepLR(optim, 1 if per == "epoch" else 3, gamma=0.5),
        per,
        clip_norm=1.0,
        best=("error", "min"),
        num_workers=2 if data else 0,
    )


def squared_error(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.mse_loss(model(batch["x"]).float(), batch["y"], reduction="sum"), len(batch["x"])


class Training:
    """Fits a job in a run directory of its own; the files there are all that is kept."""

    def __init__(
        self,
        folder: Path,
        job: dict[str, Any],
        comm: Comm | None,
        settings: dict[str, Any],
        name: str,
    ):
        self.run_dir = folder / name
        self.job = job
        self.comm = comm
        self.settings = {
            "epochs": 2,
            "global_batch": 8,
            "snapshot_every": 1,
            "progress": False,
            **settings,
        }

    def advance(self, until: int) -> None:
        settings = Settings(self.run_dir, steps=until, **self.settings)
        self.result = Trainer(tiny_job(**self.job), settings, comm=self.comm).fit().as_json()

    def outcome(self) -> Any:
        same = {
            name: self.result[name] for name in ("weights_sha256", "steps", "train_loss", "metrics")
        }
        first = (
            self.comm is None or self.comm.world.is_first
        )  # the one that writes, and has written, the file
        return same, (self.run_dir / "metrics.jsonl").read_bytes() if first else b""


def test_a_snapshot_has_the_score_of_its_own_weights_or_none(tmp_path: Path) -> None:
    """Else one from the middle of an epoch would be kept as the best for what another's weights
    have reached.
    """
    Training(tmp_path, {}, None, {"keep": 10}, "run").advance(6)
    manifests = (
        json.loads(path.read_text()) for path in tmp_path.glob("run/snapshots/*/manifest.json")
    )
    assert {m["step"]: "score" in m for m in manifests} == {
        step: step in (4, 6) for step in range(1, 7)
    }


def test_half_of_what_an_evaluation_takes_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for job, is_warned in ((tiny_job(), False), (replace(tiny_job(), metrics=None), True)):
        Trainer(job, Settings(tmp_path / str(is_warned), global_batch=8)).fit()
        assert (
            "no evaluation: it needs eval_data and metrics" in capsys.readouterr().err
        ) == is_warned


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adam": ({}, {}),
    "momentum, schedule per epoch": ({"optimizer": "sgd", "per": "epoch"}, {}),
    "bf16": ({}, {"precision": "bf16"}),
    "fp16": ({}, {"precision": "fp16"}),
    "microbatches with batch norm": ({"norm": True}, {"microbatch": 4}),
    "batch norm": ({"norm": True}, {}),
    "warm-up": ({"optimizer": "sgd"}, {"warmup_steps": 5}),
    "rare snapshots": ({}, {"snapshot_every": 100}),
}
FEW = "momentum, schedule per epoch", "fp16", "microbatches with batch norm"


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")  # fp16 skips its first steps
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.slow, id=name)
        for name in VARIANTS
    ],
)
def test_a_trainer_stopped_at_any_step_ends_with_the_same_bits(
    variant: str, tmp_path: Path
) -> None:
    check_resume(
        partial(Training, tmp_path, VARIANTS[variant][0], None, VARIANTS[variant][1]),
        8,
        range(1, 8),
    )


def test_a_trainer_stopped_twice_ends_with_the_same_bits(tmp_path: Path) -> None:
    check_resume_twice(partial(Training, tmp_path, {}, None, {}), 8, 3, 6)


@pytest.mark.ranks
def test_a_trainer_with_augmented_items_from_workers_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    check_resume(partial(Training, tmp_path, {"data": Noisy()}, None, {}), 8, [1, 4, 6])


def test_a_run_begun_before_orders_were_named_goes_on_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken, old, new = (
        Training(tmp_path, {}, None, {}, name) for name in ("unbroken", "old", "new")
    )
    unbroken.advance(8)
    old.advance(3)
    config = json.loads((old.run_dir / "config.json").read_text())
    assert config["plan"].pop("shuffle") == "sort"
    (old.run_dir / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("stepladder.core.plan.MAX_SORTED", 0)
    new.advance(8)
    old.advance(8)
    assert old.outcome() == unbroken.outcome() != new.outcome()
    assert json.loads((new.run_dir / "config.json").read_text())["plan"]["shuffle"] == "feistel"
    assert audit(old.run_dir).ok and audit(new.run_dir).ok


# -- several ranks ---------------------------------------------------------------------------------


def check_ranks(comm: Comm, folder: Path, sync: str, precision: str) -> None:
    job = {"optimizer": "sgd", "wide": 50_000}  # two buckets
    settings = {"sync": sync, "precision": precision, "snapshot_every": 100}
    check_resume(partial(Training, folder, job, comm, settings), 8, [1, 2, 4, 7])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "num_ranks, sync, precision",
    [
        (3, "ddp", "fp32"),
        pytest.param(3, "manual", "fp32", marks=pytest.mark.slow),
        pytest.param(3, "ddp", "fp16", marks=pytest.mark.slow),
    ],
)
def test_resumed_on_as_many_ranks_it_ends_with_the_same_bits(
    num_ranks: int, sync: str, precision: str, tmp_path: Path
) -> None:
    run_ranks(check_ranks, num_ranks, tmp_path, sync, precision)


MOVING = {
    "epochs": 2,
    "global_batch": 12,
    "microbatch": 3,
}  # 8 full steps and one of 5 samples per epoch


def fit_to(comm: Comm | None, run_dir: Path, until: int) -> dict[str, Any]:
    torch.manual_seed(2)
    x = torch.randn(101, 6)
    job = tiny_job(data={"x": x, "y": x.sum(1, keepdim=True)})
    return (
        Trainer(job, Settings(run_dir, steps=until, progress=False, **MOVING), comm=comm)
        .fit()
        .as_json()
    )


def losses(run_dir: Path) -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    fit_to(None, run_dir, 18)
    return losses(run_dir)


@pytest.mark.ranks
@pytest.mark.parametrize("before, after, stop_at", [(1, 2, 3), (4, 3, 9)])
def test_resumed_on_another_number_of_ranks_each_sample_is_used_once_and_the_curve_is_the_same(
    before: int, after: int, stop_at: int, tmp_path: Path, losses_alone: list[float]
) -> None:
    for num_ranks, until in ((before, stop_at), (after, 18)):
        run_ranks(fit_to, num_ranks, tmp_path / "run", until)
    report = audit(tmp_path / "run")
    assert (report.lost, report.repeated, report.ok) == (0, 0, True)
    assert [epoch.never_seen for epoch in report.epochs] == [0, 0]
    assert losses(tmp_path / "run") == pytest.approx(losses_alone, rel=1e-5)


# -- the command -----------------------------------------------------------------------------------

MLP = ("mlp", "--samples", 300, "--global-batch", 64, "--hidden", 16)


@pytest.mark.ranks
def test_a_command_stopped_by_steps_ends_with_the_same_bits(tmp_path: Path) -> None:
    unbroken = train(*MLP, "--epochs", 2, "--run-dir", "unbroken", cwd=tmp_path)
    assert train(*MLP, "--epochs", 2, "--steps", 7, cwd=tmp_path)["steps"] == 7
    resumed = train(*MLP, "--epochs", 2, cwd=tmp_path)
    assert resumed["resumed_from_step"] == 7
    assert resumed["weights_sha256"] == unbroken["weights_sha256"]
    assert (tmp_path / "runs/mlp/metrics.jsonl").read_bytes() == (
        tmp_path / "unbroken/metrics.jsonl"
    ).read_bytes()


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
def test_sigterm_in_mid_run_exits_75_with_a_snapshot_and_resumes_to_the_same_bits(
    nproc: int, tmp_path: Path
) -> None:
    options = (*MLP, "--nproc", nproc, "--epochs", 10**6)
    with started("train", *options, cwd=tmp_path) as running:
        running.wait_for(tmp_path / "runs/mlp/metrics.jsonl")
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 75
        stopped = int(
            re.findall(r"stopped at step (\d+), to be resumed", running.out.read_text())[0]
        )
    assert (
        max(path.name for path in (tmp_path / "runs/mlp/snapshots").iterdir())
        == f"step_{stopped:08d}"
    )
    resumed = train(*options, "--steps", stopped + 8, cwd=tmp_path)
    assert resumed["resumed_from_step"] == stopped
    unbroken = train(*options, "--steps", stopped + 8, "--run-dir", "unbroken", cwd=tmp_path)
    assert resumed["weights_sha256"] == unbroken["weights_sha256"]
    assert audited(tmp_path / "runs/mlp")["ok"]
