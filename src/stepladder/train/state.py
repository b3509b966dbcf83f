"""Where a run stands: the state that a snapshot keeps beside the weights, and the result that
`fit()` returns.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from stepladder.core.settings import Settings
from stepladder.core.stored import fit
from stepladder.rank.torch_fixes import step_without_dynamo
from stepladder.storage.snapshot import Snapshot
from stepladder.train.comm import Comm
from stepladder.train.flat_optimizer import FlatOptimizer, make_flat_optimizer
from stepladder.train.job import Job
from stepladder.train.optimizer_shards import OptimizerShards, make_optimizer_shards, restride_state
from stepladder.train.shard_replicas import ShardReplicas
from stepladder.train.weight_average import WeightAverage

if TYPE_CHECKING:
    from stepladder.train.full_shards import FullShards

RESULT_SCHEMA = 1  # of result.json, and of what `train --json` prints
OPTIMIZER, SCHEDULE, SCALER = "optimizer", "schedule", "scaler"  # keys of a snapshot's state
EPOCH_SUMS, METRICS, TRAIN_LOSS, BEST = "epoch_sums", "metrics", "train_loss", "best"
AVERAGE = "average"


@dataclass(frozen=True)
class Best:
    """The best value of the metric that the job's `best` names, and the step it was reached at."""

    metric: str
    value: float
    step: int


@dataclass
class TrainState:
    """Where a run stands. Everything random is keyed, so nothing here belongs to a rank.

    step: optimizer steps done.  epoch_loss, epoch_count: sums over the current epoch so far, at the
    last flush. metrics: of the last evaluation, which was after step `evaluated`.  train_loss: mean
    over the last whole epoch. shards: what spreads the optimizer's state over the ranks; None: each
    has all of it.  full: the same, where it spreads the weights too. copies: what ranks go on by,
    where two hold each slice. flat: what has the optimizer step one vector; None: it steps each
    parameter. average: of the weights, where the job has one."""

    job: Job
    scaler: torch.amp.GradScaler = field(
        default_factory=lambda: torch.amp.GradScaler(enabled=False)
    )
    step: int = 0
    epoch_loss: float = 0.0
    epoch_count: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated_step: int = -1
    train_loss: float = math.nan
    best: Best | None = None
    shards: OptimizerShards | FullShards | None = None
    full_shards: FullShards | None = None
    shard_replicas: ShardReplicas | None = None
    flat_optimizer: FlatOptimizer | None = None
    average: WeightAverage | None = None

    def prepare_model(self, settings: Settings, comm: Comm) -> None:
        """The model on its device; one that is to be spread goes there block by block, with
        `spread`.
        """
        if settings.checkpoint_blocks:
            from stepladder.train.checkpoint_blocks import (
                checkpoint_blocks,  # late: few jobs ask for it
            )

            checkpoint_blocks(self.job)
        if settings.shard != "full" or comm.alone:
            self.job.model.to(comm.device)

    def shard(self, settings: Settings, comm: Comm) -> None:
        """Over the ranks what the settings ask for. All have the same weights, and no state is
        loaded yet.
        """
        if settings.shard == "full" and not comm.alone:
            from stepladder.train.full_shards_exact import (
                full_shards_class,
            )  # late: torch's DTensor takes a second to import

            self.shards = self.full_shards = full_shards_class(settings.sync)(self.job, comm)
        else:
            self.shards = shards = make_optimizer_shards(settings, self.job.optimizer, comm)
            if shards is not None and settings.shard_copies > 1:
                self.shard_replicas = ShardReplicas(shards)
        if self.shards is None and not self.scaler.is_enabled():
            self.flat_optimizer = make_flat_optimizer(self.job.optimizer, comm.device)
        if self.job.ema_decay is not None:
            self.average = WeightAverage(self.job.model, self.job.ema_decay)
            if self.full_shards is not None:
                self.full_shards.average = self.average

    @property
    def gathers_weights(self) -> bool:
        """Whether all ranks must make as many passes, for they gather weights with each other."""
        return self.full_shards is not None

    def restore(self, settings: Settings, comm: Comm, snapshot: Snapshot | None) -> None:
        """`spread`, then stand where a snapshot was taken, of any number of ranks with any --shard."""
        self.shard(settings, comm)
        if snapshot is None:
            return
        snapshot.restore_model(self.job.model)
        if self.average is not None:
            self.average.reset()
        if snapshot.step == 0:  # of `stepladder import`: weights and nothing else
            return
        self.load_state_dict(
            snapshot.state(self.shards.snapshot_prefix if self.shards else None), snapshot.step
        )
        if self.shards is not None:
            self.shards.load_slices(snapshot.reader)

    @property
    def averaged_weights(self) -> AbstractContextManager[None]:
        """Around an evaluation: in the block the model has the average as its weights, where the
        job has one.
        """
        return nullcontext() if self.average is None else self.average.swapped_in()

    def step_optimizer(self) -> bool:
        """The optimizer's. False where the gradient is too large for the scaler, which skips the
        step: the reduced one, so on all ranks."""
        if self.flat_optimizer is not None:
            self.flat_optimizer.step()
            return True
        scaler, optimizer = self.scaler, self.job.optimizer
        stepping = nullcontext(optimizer.step) if self.shards is None else self.shards.stepping()
        with step_without_dynamo(), stepping as step:
            if not scaler.is_enabled():
                step()
                return True
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            return scaler.get_scale() >= scale

    def finish_step(self) -> None:
        """All weights are as they are after the step."""
        if self.average is not None:
            self.average.update()
        if self.shard_replicas is not None:
            self.shard_replicas.unfinished_step = None

    def level(self) -> None:
        """After a loss all ranks have all that they need."""
        if self.shard_replicas is not None and self.shard_replicas.finish_resharding():
            self.finish_step()

    def record_evaluation(self, metrics: dict[str, float]) -> None:
        """What an evaluation after the last step has found."""
        self.metrics, self.evaluated_step = metrics, self.step
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
        """Of the weights as they are: larger is better. None where they were not evaluated, or for
        no metric.
        """
        if (
            self.job.best is None
            or self.evaluated_step != self.step
            or self.job.best[0] not in self.metrics
        ):
            return None
        return self.sign * self.metrics[self.job.best[0]]

    @property
    def about(self) -> dict[str, Any]:
        """What a snapshot's manifest says of it: its metrics, and its score where they are of these
        weights.
        """
        return {"metrics": self.metrics} | ({} if self.score is None else {"score": self.score})

    def state_dict(self) -> dict[str, Any]:
        """Without what `shards.slices` has."""
        return {
            OPTIMIZER: (self.shards or self.job.optimizer).state_dict(),
            SCHEDULE: self._schedules(),
            SCALER: self.scaler.state_dict() or None,
            EPOCH_SUMS: (self.epoch_loss, self.epoch_count),
            METRICS: self.metrics,
            TRAIN_LOSS: self.train_loss,
            BEST: (self.best.metric, self.best.value, self.best.step)
            if self.best is not None
            else None,
        } | (
            {}
            if self.average is None
            else {AVERAGE: {} if self.full_shards is not None else self.average.values}
        )

    def _schedules(self) -> Any:
        """One schedule's state as it is, so that runs from before there could be several go on."""
        states = [schedule.state_dict() for schedule in self.job.schedules]
        return states if isinstance(self.job.schedule, tuple) else next(iter(states), None)

    def load_state_dict(self, stored: dict[str, Any], step: int, slices: bool = True) -> None:
        """step: the snapshot's, which may have been written without `best`.  slices: False keeps
        its own.
        """
        self.job.optimizer.load_state_dict(stored[OPTIMIZER])
        if self.full_shards is None:
            restride_state(self.job.optimizer)
        if slices and (stepper := self.shards or self.flat_optimizer) is not None:
            stepper.adopt_state()
        states = stored[SCHEDULE] if isinstance(self.job.schedule, tuple) else [stored[SCHEDULE]]
        for schedule, state in zip(self.job.schedules, states, strict=False):
            schedule.load_state_dict(state)
        if self.average is not None and stored.get(AVERAGE):
            self.average.load(stored[AVERAGE])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(stored[SCALER])
        self.epoch_loss, self.epoch_count = stored[EPOCH_SUMS]
        self.metrics, self.train_loss = stored[METRICS], stored[TRAIN_LOSS]
        best = stored.get(BEST)
        self.best = Best(*best) if best is not None else None
        self.step = step


@dataclass(frozen=True)
class TrainResult:
    """The end of one attempt of a run.

    epochs: asked for.  steps: optimizer steps done, in all attempts.  train_loss: mean over the
    last epoch, None before its end or where it is not finite.  metrics: of the last evaluation,
    None where not finite. best: None where the job names no metric.  weights_sha256: over
    parameters and persistent buffers. samples_per_second, seconds: of this attempt.  stopped: by a
    signal or a time limit, to be resumed."""

    recipe: str
    world_size: int
    sync: str
    epochs: int
    steps: int
    train_loss: float | None
    metrics: dict[str, float | None]
    best: Best | None
    weights_sha256: str
    samples_per_second: float
    seconds: float
    resumed_from_step: int
    run_dir: str
    stopped: bool

    def as_json(self) -> dict[str, Any]:
        """What `train --json` prints and result.json holds."""
        return {"schema": RESULT_SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(stored: dict[str, Any]) -> TrainResult:
        """The result of a result.json, also of one without `best`. ValueError where it is none."""
        result: TrainResult = fit({"best": None, **stored}, TrainResult)
        return result

    def summary(self) -> list[str]:
        """The lines for a person: the last values with the best one, and how it ended."""
        values = {"train_loss": self.train_loss, **self.metrics}
        known = {name: value for name, value in values.items() if value is not None}
        lines = ["  ".join(f"{name} {value:.4f}" for name, value in known.items())] if known else []
        if self.best is not None and lines:
            lines[0] += (
                f"  (best {self.best.metric} {self.best.value:.4f}, after step {self.best.step})"
            )
        end = (
            f"stopped at step {self.steps}, to be resumed"
            if self.stopped
            else f"{self.steps} steps done"
        )
        return [*lines, f"{end}; everything is in {self.run_dir}"]
