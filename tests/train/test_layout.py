"""The contract of every layout: the curve of one process, a snapshot from which any other layout
continues on another number of processes, no more memory than its part, and the run of one process
also where a rank is lost. Where in a step it may be lost is in test_survive.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from processes import JOBS, run
from processes import train as train_alone
from ranks import run_ranks
from stepladder import Job, Settings, World
from stepladder.core.settings import LAYOUTS
from stepladder.rank.preemption import StopSignals
from stepladder.storage.audit import audit
from stepladder.storage.snapshot import read_newest_snapshot
from stepladder.train.comm import Comm
from stepladder.train.determinism import deterministic
from stepladder.train.fake_tensors import to_local
from stepladder.train.job import Recipe
from stepladder.train.layout import find_layout
from stepladder.train.opening import open_session
from stepladder.train.recovery import Position, RecoveryDecision, decide
from stepladder.train.run_spec import RunSpec
from stepladder.train.session import Session
from stepladder.train.trainer import TrainingLoop

STEPS = 6  # of the whole run: two epochs
NEAR = {"rtol": 1e-3, "atol": 1e-6}  # of an optimizer's state, where gradients are added otherwise


class Case(NamedTuple):
    """One layout: its class, the settings that ask for it, and the part of the state on a rank."""

    name: str
    shard: str = "none"
    copies: int = 1
    sync: str = "exact"
    fused: bool = False
    part: float = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        return {"shard": self.shard, "shard_copies": self.copies, "sync": self.sync}


CASES = [
    Case("StateLayout", fused=True),  # a fused step is not taken on one vector
    Case("Flat"),
    Case("Zero1", "optimizer", part=1 / 3),
    Case("Replicated", "optimizer", 2, part=2 / 3),
    Case("FullyShardedExactLayout", "full", part=1 / 3),
    Case("FullyShardedLayout", "full", sync="ddp", part=1 / 3),
]
FEW = "Zero1", "FullyShardedExactLayout"  # the others are tested with the slow tests


def make_job(fused: bool) -> Job:
    """Return a job with blocks, groups, clipping, a schedule, dropout, and an average of the weights."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(46, 13, generator=generator)
    y = torch.randn(46, 5, generator=generator)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(13, 64), nn.Sequential(*blocks), nn.Linear(64, 5))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == d], "weight_decay": 0.1 * d}
        for d in (1, 2)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4, fused=fused)
    return Job(
        model=model,
        optimizer=optimizer,
        train_data=(x, y),
        clip_norm=0.1,
        ema_decay=0.9,
        loss=lambda model, batch: ((model(batch[0]) - batch[1]).square().sum(), len(batch[0])),
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    )


def train(comm: Comm, run_dir: Path, case: Case, steps: int = STEPS) -> dict[str, Any]:
    """Train to a step; return the weights' hash, the layout, and how much state this rank holds."""
    job = make_job(case.fused)
    settings = Settings(
        run_dir, epochs=2, steps=steps, global_batch=16, microbatch=2, progress=False,
        **case.settings,
    )  # fmt: skip
    with open_session(RunSpec.make(job, settings, Recipe(), comm), comm) as session:
        assert isinstance(session, Session)
        with (
            deterministic(case.sync == "exact", comm.device),
            TrainingLoop(session, StopSignals()) as loop,
        ):
            while not session.is_over:
                loop.step()
        layout = session.state.layout
        values = [v for state in layout.optimizer_state.values() for v in state.values()]
        return {
            "layout": type(layout).__name__,
            "held": sum(to_local(value).numel() for value in values if value.ndim),
            "hash": session.finish(False).weights_sha256,
        }


def alone() -> Comm:
    return Comm(World(), torch.device("cpu"))


def losses(run_dir: Path) -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_every_layout_has_a_case(tmp_path: Path) -> None:
    assert {(case.shard, case.copies) for case in CASES} == LAYOUTS.keys()
    for shard, copies in LAYOUTS:
        find_layout(Settings(tmp_path, shard=shard, shard_copies=copies))  # type: ignore[arg-type]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name in FEW else pytest.mark.slow, id=case.name)
        for case in CASES
    ],
)
def test_three_processes_then_two_of_another_layout_then_one_have_the_run_of_one(
    case: Case, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    complete = train(alone(), whole, case._replace(shard="none", copies=1))
    results = run_ranks(train, 3, parts, case, 2)
    assert {result["layout"] for result in results} == {case.name}
    assert len({result["hash"] for result in results}) == 1
    for result in results:
        assert result["held"] == pytest.approx(case.part * complete["held"], rel=0.1)
    follower = "none" if case.shard == "full" else "full"
    run_ranks(train, 2, parts, case._replace(shard=follower, copies=1), 4)
    run_ranks(train, 2, parts, case, 5)
    last = train(alone(), parts, case._replace(shard="none", copies=1))
    assert audit(parts).ok
    states = [read_newest_snapshot(path).state() for path in (parts, whole)]
    if case.sync != "exact":
        assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
        torch.testing.assert_close(*(state["optimizer"]["state"] for state in states), **NEAR)
        return
    assert last["hash"] == complete["hash"]
    assert losses(parts) == losses(whole)
    for name, value in states[1]["average"].items():
        assert torch.equal(states[0]["average"][name], value), name
    assert states[0]["optimizer"]["param_groups"] == states[1]["optimizer"]["param_groups"]
    for number, values in states[1]["optimizer"]["state"].items():
        for name, value in values.items():
            assert torch.equal(states[0]["optimizer"]["state"][number][name], value), name


LOSS = "--microbatch", 4, "--global-batch", 32, "--epochs", 3, "--steps", 12, "--snapshot-every", 4


@pytest.fixture(scope="module")
def run_of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run-of-one")
    train_alone(JOBS / "killed.py", "--sync", "exact", *LOSS, cwd=folder)
    return folder / "runs/killed"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name in FEW else pytest.mark.slow, id=case.name)
        for case in CASES
        if not case.fused
    ],
)
def test_a_run_that_has_lost_a_rank_ends_as_the_run_of_one(
    case: Case, tmp_path: Path, run_of_one: Path
) -> None:
    flags = "--shard", case.shard, "--shard-copies", case.copies, "--sync", case.sync
    kill = {"KILL": "0:backward:7", "KILLED": str(tmp_path)}
    job = JOBS / "killed.py"
    done = run("train", job, *LOSS, *flags, "--nproc", 3, cwd=tmp_path, env=kill)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed-0").exists()
    survives = LAYOUTS[case.shard, case.copies].survives_loss
    assert ("in-place recovery" in done.stderr) is survives, done.stderr
    assert ("restarting all ranks from the last snapshot" in done.stderr) is not survives
    assert (
        "if a process is lost, all restart from the last snapshot" in done.stderr
    ) is not survives
    run_dir = tmp_path / "runs/killed"
    report = audit(run_dir)
    assert (report.ok, report.attempts) == (True, 1 if survives else 2)
    if case.sync == "exact":
        assert losses(run_dir) == losses(run_of_one)
        assert weights_hash(run_dir) == weights_hash(run_of_one)
    else:
        assert losses(run_dir) == pytest.approx(losses(run_of_one), rel=1e-4)


def weights_hash(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["weights_sha256"])


DONE = Position(7, False)
PENDING = Position(7, True)  # the end of step 7 is still to be done
BEHIND = Position(6, False)
JOINING = Position(-1, False)


@pytest.mark.parametrize(
    ("positions", "decisions"),
    [
        ([DONE, DONE], [(7, False, None, False)] * 2),
        ([DONE, PENDING], [(7, True, None, False)] * 2),
        ([BEHIND, DONE], [(7, False, 1, True), (7, False, 1, False)]),
        ([BEHIND, PENDING, DONE], [(7, False, 1, True), (7, True, 1, False), (7, True, 1, False)]),
        ([JOINING, DONE], [(7, False, 1, True), (7, False, 1, False)]),
        ([JOINING, JOINING], [(-1, False, None, False)] * 2),
    ],
)
def test_what_each_rank_does_after_a_loss(
    positions: list[Position], decisions: list[tuple[Any, ...]]
) -> None:
    ranks = range(len(positions))
    assert [decide(positions, rank) for rank in ranks] == [
        RecoveryDecision(*row) for row in decisions
    ]
