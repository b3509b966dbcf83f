"""What a snapshot keeps beside the weights comes back, also from one written before there was a
best value.
"""

from __future__ import annotations

import math

import pytest
import torch

from stepladder import Job, TrainResult, World, mean_loss
from stepladder.train.comm import Comm
from stepladder.train.layout.base import StateLayout
from stepladder.train.state import BEST, TrainState
from stepladder.train.train_result import Best


def state(kind: str = "max") -> TrainState:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss = mean_loss(torch.nn.functional.mse_loss)
    job = Job(model, optimizer, loss, torch.ones(4, 2), schedule=schedule, best=("score", kind))  # type: ignore[arg-type]
    return TrainState(job, StateLayout(job, Comm(World(), torch.device("cpu"))))


def test_what_is_stored_is_loaded() -> None:
    before = state()
    before.step = 7
    before.epoch_loss = 1.5
    before.epoch_count = 3.0
    before.train_loss = 0.25
    before.record_evaluation({"score": 0.5})
    before.job.optimizer.step()
    before.job.schedule.step()
    after = state()
    after.load_state_dict(before.state_dict(), step=7)
    assert after.state_dict() == before.state_dict()
    assert (after.step, after.best) == (7, Best("score", 0.5, 7))
    assert after.job.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_snapshot_without_a_best_value_is_loaded() -> None:
    stored = state().state_dict()
    del stored[BEST]
    after = state()
    after.load_state_dict(stored, step=3)
    assert after.best is None and after.step == 3


@pytest.mark.parametrize(
    ("kind", "best"), [("max", Best("score", 0.8, 2)), ("min", Best("score", 0.1, 3))]
)
def test_the_best_value_is_kept_with_its_step(kind: str, best: Best) -> None:
    train_state = state(kind)
    for train_state.step, score in enumerate([0.3, 0.8, 0.1, math.nan, 0.8], start=1):
        train_state.record_evaluation({"score": score})
    assert train_state.best == best


def test_a_score_is_of_the_weights_as_they_are() -> None:
    train_state = state("min")
    train_state.record_evaluation({"score": 0.5})
    assert train_state.score == -0.5
    train_state.step += 1
    assert train_state.score is None


def test_a_result_is_read_back_also_one_without_a_best_value() -> None:
    result = TrainResult(
        recipe="mlp",
        world_size=2,
        sync="ddp",
        epochs=1,
        steps=4,
        train_loss=0.5,
        metrics={"score": 0.25},
        best=Best("score", 0.5, 2),
        weights_sha256="ab",
        samples_per_second=10.0,
        seconds=1.0,
        resumed_from_step=0,
        run_dir="runs/mlp",
        stopped=False,
    )
    stored = result.as_json()
    assert TrainResult.from_json(stored) == result
    assert (
        result.summary()[0] == "train_loss 0.5000  score 0.2500  (best score 0.5000, after step 2)"
    )
    del stored[BEST]
    assert TrainResult.from_json(stored).best is None
