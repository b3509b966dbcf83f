"""The state of a run that a snapshot keeps beside the model's weights, and the names it has there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from stepladder.train.job import Job
from stepladder.train.result import Best

OPTIMIZER, SCHEDULE, SCALER = "optimizer", "schedule", "scaler"
EPOCH_SUMS, METRICS, TRAIN_LOSS, BEST = "epoch_sums", "metrics", "train_loss", "best"


@dataclass
class TrainState:
    """Where a run stands. Everything random is keyed, so nothing here belongs to a rank.

    step: optimizer steps done.  epoch_loss, epoch_count: sums over the current epoch so far, at the last flush.
    metrics: of the last evaluation, which was after step `evaluated`.  train_loss: mean over the last whole epoch.
    """

    job: Job
    scaler: torch.amp.GradScaler | None = None
    step: int = 0
    epoch_loss: float = 0.0
    epoch_count: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated: int = -1
    train_loss: float = math.nan
    best: Best | None = None

    def evaluate_to(self, metrics: dict[str, float]) -> None:
        """What an evaluation after the last step has found."""
        self.metrics, self.evaluated = metrics, self.step
        score = self.score
        if score is not None and not math.isnan(score):
            name, sign = self.job.best[0], self.sign  # type: ignore[index]
            if self.best is None or score > sign * self.best.value:
                self.best = Best(name, metrics[name], self.step)

    @property
    def sign(self) -> int:
        return -1 if self.job.best is not None and self.job.best[1] == "min" else 1

    @property
    def score(self) -> float | None:
        """Of the weights as they are: larger is better. None where they were not evaluated, or for no metric."""
        if self.job.best is None or self.evaluated != self.step or self.job.best[0] not in self.metrics:
            return None
        return self.sign * self.metrics[self.job.best[0]]

    def state_dict(self) -> dict[str, Any]:
        return {
            OPTIMIZER: self.job.optimizer.state_dict(),
            SCHEDULE: self.job.schedule.state_dict() if self.job.schedule is not None else None,
            SCALER: self.scaler.state_dict() if self.scaler is not None else None,
            EPOCH_SUMS: (self.epoch_loss, self.epoch_count),
            METRICS: self.metrics,
            TRAIN_LOSS: self.train_loss,
            BEST: (self.best.metric, self.best.value, self.best.step) if self.best is not None else None,
        }

    def load_state_dict(self, stored: dict[str, Any], step: int) -> None:
        """step: the snapshot's. One that was written without `best` is taken as well."""
        self.job.optimizer.load_state_dict(stored[OPTIMIZER])
        if self.job.schedule is not None:
            self.job.schedule.load_state_dict(stored[SCHEDULE])
        if self.scaler is not None:
            self.scaler.load_state_dict(stored[SCALER])
        self.epoch_loss, self.epoch_count = stored[EPOCH_SUMS]
        self.metrics, self.train_loss = stored[METRICS], stored[TRAIN_LOSS]
        best = stored.get(BEST)
        self.best = Best(*best) if best is not None else None
        self.step = step
