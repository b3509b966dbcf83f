"""The state of a run, which a snapshot keeps besides the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from stepladder.core.settings import Settings
from stepladder.rank.torch_fixes import step_without_dynamo
from stepladder.storage.snapshot import Snapshot
from stepladder.train.comm import Comm
from stepladder.train.flat_optimizer import FlatOptimizer, make_flat_optimizer
from stepladder.train.job import Job
from stepladder.train.optimizer_shards import OptimizerShards, make_optimizer_shards, restride_state
from stepladder.train.shard_replicas import ShardReplicas
from stepladder.train.train_result import Best
from stepladder.train.weight_average import WeightAverage

if TYPE_CHECKING:
    from stepladder.train.full_shards import FullShards

# Keys of a snapshot's state.
OPTIMIZER = "optimizer"
SCHEDULE = "schedule"
SCALER = "scaler"
EPOCH_SUMS = "epoch_sums"
METRICS = "metrics"
TRAIN_LOSS = "train_loss"
BEST = "best"
AVERAGE = "average"
# Attributes of a TrainState that the end of a step may change.
RECORDS = ("epoch_loss", "epoch_count", "metrics", "evaluated_step", "train_loss", "best")


@dataclass
class TrainState:
    """The state of a run. All randomness is keyed, so nothing here belongs to a single rank.

    Args:
        job: The job whose model and optimizer are part of the state.
        scaler: Scales the loss with --precision fp16, else does nothing.
        step: Optimizer steps done.
        epoch_loss: Sum of the losses of the current epoch, up to the last flush.
        epoch_count: What these losses count.
        metrics: Of the last evaluation.
        evaluated_step: The step after which that evaluation was, -1 before the first.
        train_loss: Mean loss over the last complete epoch.
        best: The best evaluation so far, if the job names a metric.
        shards: With --shard, spreads the optimizer's state over the ranks.
        full_shards: The same object with --shard full, which spreads the weights too.
        shard_replicas: With --shard-copies 2, what ranks need to continue after a loss.
        flat_optimizer: Steps all parameters as one vector, where the optimizer allows it.
        average: The moving average of the weights, if the job has one.
    """

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

    # -- before the first step ---------------------------------------------------------------------

    def prepare_model(self, settings: Settings, comm: Comm) -> None:
        """Move the model to its device, except a model that `shard` moves block by block."""
        if settings.checkpoint_blocks:
            from stepladder.train.checkpoint_blocks import (
                checkpoint_blocks,  # late: few jobs ask for it
            )

            checkpoint_blocks(self.job)
        if settings.shard != "full" or comm.alone:
            self.job.model.to(comm.device)

    def shard(self, settings: Settings, comm: Comm) -> None:
        """Spread over the ranks what the settings ask for, before any state is loaded.

        All ranks must have the same weights. A collective.
        """
        if settings.shard == "full" and not comm.alone:
            # Late: torch's DTensor takes a second to import.
            from stepladder.train.full_shards_exact import full_shards_class

            self.full_shards = full_shards_class(settings.sync)(self.job, comm)
            self.shards = self.full_shards
        else:
            optimizer_shards = make_optimizer_shards(settings, self.job.optimizer, comm)
            self.shards = optimizer_shards
            if optimizer_shards is not None and settings.shard_copies > 1:
                self.shard_replicas = ShardReplicas(optimizer_shards)
        if self.shards is None and not self.scaler.is_enabled():
            self.flat_optimizer = make_flat_optimizer(self.job.optimizer, comm.device)
        if self.job.ema_decay is not None:
            self.average = WeightAverage(self.job.model, self.job.ema_decay)
            if self.full_shards is not None:
                self.full_shards.average = self.average

    def restore(
        self,
        settings: Settings,
        comm: Comm,
        snapshot: Snapshot | None,
    ) -> None:
        """Shard the state, then load a snapshot, whatever ranks and --shard it was taken with."""
        self.shard(settings, comm)
        if snapshot is None:
            return
        snapshot.restore_model(self.job.model)
        if self.average is not None:
            self.average.reset()
        if snapshot.step == 0:  # made by `stepladder import`: it has weights and nothing else
            return
        if self.shards is None:
            self.load_state_dict(snapshot.state(), snapshot.step)
        else:
            self.load_state_dict(snapshot.state(self.shards.snapshot_prefix), snapshot.step)
            self.shards.load_slices(snapshot.reader)

    # -- in each step ------------------------------------------------------------------------------

    @property
    def gathers_weights(self) -> bool:
        """Whether a pass gathers weights, so that all ranks must make equally many passes."""
        return self.full_shards is not None

    def step_optimizer(self) -> bool:
        """Step the optimizer.

        Returns:
            False if the scaler skipped the step because the gradient is too large for fp16. All
            ranks have the same gradient, so all of them skip it.
        """
        if self.flat_optimizer is not None:
            self.flat_optimizer.step()
            return True
        optimizer = self.job.optimizer
        stepping = nullcontext(optimizer.step) if self.shards is None else self.shards.stepping()
        with step_without_dynamo(), stepping as step:
            if not self.scaler.is_enabled():
                step()
                return True
            scale = self.scaler.get_scale()
            self.scaler.step(optimizer)
            self.scaler.update()
            return self.scaler.get_scale() >= scale

    def advance(self) -> int:
        """Count a step as done, and return how many are done."""
        self.step += 1
        return self.step

    def finish_step(self) -> None:
        """Update what follows the weights, once all of them are stepped and gathered."""
        if self.average is not None:
            self.average.update()
        if self.shard_replicas is not None:
            self.shard_replicas.finish_step()

    # -- losses and metrics ------------------------------------------------------------------------

    def add_to_epoch(
        self,
        losses: Iterable[float],
        counts: Sequence[float],
    ) -> None:
        """Add the losses of steps to the sums of the current epoch."""
        for loss in losses:  # one by one: the moment of a flush must not change the bits of the sum
            self.epoch_loss += loss
        self.epoch_count += sum(counts)

    def set_train_loss(self) -> None:
        """Set the mean loss of the epoch that ends."""
        self.train_loss = math.nan
        if self.epoch_count:
            self.train_loss = self.epoch_loss / self.epoch_count

    def clear_epoch(self) -> None:
        """Begin the sums of the next epoch."""
        self.epoch_loss = 0.0
        self.epoch_count = 0.0

    @property
    def averaged_weights(self) -> AbstractContextManager[None]:
        """A context in which the model has the averaged weights, if the job has an average."""
        if self.average is None:
            return nullcontext()
        return self.average.swapped_in()

    def record_evaluation(self, metrics: dict[str, float]) -> None:
        """Take the metrics of an evaluation after the last step."""
        self.metrics = metrics
        self.evaluated_step = self.step
        score = self.score
        if self.job.best is None or score is None or math.isnan(score):
            return
        name = self.job.best[0]
        if self.best is None or score > self._sign * self.best.value:
            self.best = Best(name, metrics[name], self.step)

    @property
    def _sign(self) -> int:
        return -1 if self.job.best is not None and self.job.best[1] == "min" else 1

    @property
    def score(self) -> float | None:
        """The value of the job's best metric for the present weights, where larger is better.

        None if the job names no metric, or the weights were not evaluated.
        """
        if self.job.best is None or self.evaluated_step != self.step:
            return None
        name = self.job.best[0]
        if name not in self.metrics:
            return None
        return self._sign * self.metrics[name]

    @property
    def manifest_entries(self) -> dict[str, Any]:
        """What the manifest of a snapshot holds: the metrics, and the score of its own weights."""
        entries: dict[str, Any] = {"metrics": self.metrics}
        if self.score is not None:
            entries["score"] = self.score
        return entries

    # -- in-place recovery -------------------------------------------------------------------------

    def mark_as_missing(self) -> None:
        """Mark the state as less advanced than that of any rank: this rank is to receive it."""
        self.step = -1

    def records(self) -> dict[str, Any]:
        """Return what the end of a step may change, for `restore_records`."""
        return {name: getattr(self, name) for name in RECORDS}

    def restore_records(self, records: dict[str, Any]) -> None:
        """Undo the end of a step."""
        for name, value in records.items():
            setattr(self, name, value)

    def replace_shards(self, shards: OptimizerShards) -> None:
        """Take the slices of the ranks that remain."""
        self.shards = shards

    def finish_recovery(self) -> None:
        """Complete a step whose weights were not gathered, once all ranks have the same state."""
        if self.shard_replicas is not None and self.shard_replicas.finish_resharding():
            self.finish_step()

    # -- snapshots ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without the slices of `shards`."""
        state = {
            OPTIMIZER: (self.shards or self.job.optimizer).state_dict(),
            SCHEDULE: self._schedule_states(),
            SCALER: self.scaler.state_dict() or None,
            EPOCH_SUMS: (self.epoch_loss, self.epoch_count),
            METRICS: self.metrics,
            TRAIN_LOSS: self.train_loss,
            BEST: self._best_as_tuple(),
        }
        if self.average is not None:
            # With --shard full the average is among the slices.
            state[AVERAGE] = {} if self.full_shards is not None else self.average.values
        return state

    def _best_as_tuple(self) -> tuple[str, float, int] | None:
        if self.best is None:
            return None
        return self.best.metric, self.best.value, self.best.step

    def _schedule_states(self) -> Any:
        """Return the state of each schedule; of a single one not in a list, as older runs have."""
        states: list[Any] = [schedule.state_dict() for schedule in self.job.schedules]
        if isinstance(self.job.schedule, tuple):
            return states
        return next(iter(states), None)

    def load_state_dict(
        self,
        stored: dict[str, Any],
        step: int,
        evaluated_step: int = -1,
        with_slices: bool = True,
    ) -> None:
        """Load what `state_dict` has returned.

        Args:
            stored: The state. Older snapshots have no `best` in it.
            step: The step that the state was taken after.
            evaluated_step: The step of the last evaluation.
            with_slices: Whether the optimizer's slices follow the loaded state. False leaves them
                as they are.
        """
        self.job.optimizer.load_state_dict(stored[OPTIMIZER])
        if self.full_shards is None:
            restride_state(self.job.optimizer)
        stepper = self.shards or self.flat_optimizer
        if with_slices and stepper is not None:
            stepper.adopt_state()
        states = stored[SCHEDULE] if isinstance(self.job.schedule, tuple) else [stored[SCHEDULE]]
        for schedule, state in zip(self.job.schedules, states, strict=False):
            schedule.load_state_dict(state)
        if self.average is not None and stored.get(AVERAGE):
            self.average.load(stored[AVERAGE])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(stored[SCALER])
        self.epoch_loss, self.epoch_count = stored[EPOCH_SUMS]
        self.metrics = stored[METRICS]
        self.train_loss = stored[TRAIN_LOSS]
        self.best = None
        if stored.get(BEST) is not None:
            self.best = Best(*stored[BEST])
        self.step = step
        self.evaluated_step = evaluated_step
