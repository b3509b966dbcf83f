"""The state of a run, which a snapshot keeps besides the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from stepladder.core.errors import InputError
from stepladder.storage.snapshot import Snapshot
from stepladder.storage.snapshot_slices import TensorSlice
from stepladder.train.job import Job
from stepladder.train.layout.base import StateLayout
from stepladder.train.optimizers import name_params
from stepladder.train.train_result import Best
from stepladder.train.weight_average import WeightAverage

# Keys of a snapshot's state.
OPTIMIZER = "optimizer"
PARAM_NAMES = "param_names"  # of the optimizer, in its order
SCHEDULE = "schedule"
SCALER = "scaler"
EPOCH_SUMS = "epoch_sums"
METRICS = "metrics"
TRAIN_LOSS = "train_loss"
BEST = "best"
AVERAGE = "average"
NEXT_VALUES = "next_values"
# Attributes of a TrainState that the end of a step may change.
RECORDS = ("epoch_loss", "epoch_count", "metrics", "evaluated_step", "train_loss", "best")


@dataclass
class TrainState:
    """The state of a run. All randomness is keyed, so nothing here belongs to a single rank.

    Args:
        job: The job whose model and optimizer are part of the state.
        layout: How model and optimizer lie on the ranks.
        scaler: Scales the loss with --precision fp16, else does nothing.
        step: Optimizer steps done.
        epoch_loss: Sum of the losses of the current epoch, up to the last flush.
        epoch_count: What divides this sum to give the mean: samples, or what the job counts.
        metrics: The metrics of the last evaluation.
        evaluated_step: The step after which it was made, -1 before the first.
        train_loss: Mean loss over the last complete epoch.
        best: The best evaluation so far, if the job names a metric.
        next_values: With `--sync exact`, loss and gradients of the next step's first microbatch
            and metrics of the evaluation's first batch when a snapshot is saved, by what they are.
        expected_values: The same of the snapshot that this run goes on from; {} if not known.
    """

    job: Job
    layout: StateLayout
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
    next_values: dict[str, Any] = field(default_factory=dict)
    expected_values: dict[str, Any] = field(default_factory=dict)
    # The moving average of the weights, if the job has one.
    average: WeightAverage | None = field(init=False)

    def __post_init__(self) -> None:
        self.average = None
        if self.job.ema_decay is not None:
            self.average = WeightAverage(self.job.model, self.job.ema_decay)

    def restore(self, snapshot: Snapshot) -> None:
        """Load a snapshot, whatever ranks and layout it was taken with."""
        snapshot.restore_model(self.job.model)
        if self.average is not None:
            self.average.reset()
        if snapshot.step == 0:  # made by `stepladder import`: it has weights and nothing else
            return
        self.load_state_dict(snapshot.state(self.layout.slice_prefix), snapshot.step)
        self.layout.load_slices(snapshot.reader)
        if self.average is not None and self.layout.gathers_weights:
            self.average.load_slices(snapshot.reader)

    def slices(self) -> dict[str, TensorSlice]:
        """Return this rank's slices, by their names in a snapshot."""
        slices = self.layout.slices()
        if self.average is not None and self.layout.gathers_weights:
            slices |= self.average.slices()
        return slices

    def advance(self) -> int:
        """Count a step as done, and return how many are done."""
        self.step += 1
        return self.step

    def finish_step(self) -> None:
        """Complete a step whose weights the remaining ranks have stepped and gathered."""
        if self.average is not None:
            self.average.update()
        self.layout.end_step()

    # -- losses and metrics ------------------------------------------------------------------------

    def add_to_epoch(self, losses: Iterable[float], counts: Sequence[float]) -> None:
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

    def note_next_values(self, values: dict[str, Any]) -> None:
        """Note what the next snapshot says of the next loss and metrics."""
        self.next_values = values

    def pop_expected_values(self) -> dict[str, Any]:
        """Return `expected_values`, which is empty afterwards."""
        values = self.expected_values
        self.expected_values = {}
        return values

    @property
    def epoch_value(self) -> float:
        """What the schedules on a plateau watch: the job's best metric, else the training loss."""
        if self.job.best is None:
            return self.train_loss
        return self.metrics.get(self.job.best[0], math.nan)

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

    # -- snapshots ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without this rank's slices."""
        state = {
            OPTIMIZER: self.layout.state_dict(),
            PARAM_NAMES: name_params(self.job.model, self.job.optimizer),
            SCHEDULE: self._schedule_states(),
            SCALER: self.scaler.state_dict() or None,
            EPOCH_SUMS: (self.epoch_loss, self.epoch_count),
            METRICS: self.metrics,
            TRAIN_LOSS: self.train_loss,
            BEST: self.best and astuple(self.best),
            NEXT_VALUES: self.next_values,
        }
        if self.average is not None:
            # Rows of the average are among the slices.
            state[AVERAGE] = {} if self.layout.gathers_weights else self.average.values
        return state

    def _schedule_states(self) -> Any:
        """Return the state of each schedule; of a single one not in a list, as older runs have."""
        states: list[Any] = [schedule.state_dict() for schedule in self.job.schedules]
        if isinstance(self.job.schedule, tuple):
            return states
        return next(iter(states), None)

    def load_state_dict(self, stored: dict[str, Any], step: int) -> None:
        """Load what `state_dict` has returned.

        Args:
            stored: The state. Older snapshots have no `best` and no names of parameters in it.
            step: The step that the state was taken after.

        Raises:
            InputError: The optimizer has its parameters in another order.
        """
        names = name_params(self.job.model, self.job.optimizer)
        if stored.get(PARAM_NAMES, names) != names:
            raise InputError(
                "the optimizer has its parameters in another order than in the snapshot",
                "a list of parameters, not a set: its order is another one in each start",
            )
        self.layout.load_state_dict(stored[OPTIMIZER])
        self.expected_values = stored.get(NEXT_VALUES, {})
        self.load_records(stored, step)

    def load_records(self, stored: dict[str, Any], step: int, evaluated_step: int = -1) -> None:
        """Load all of the state but the optimizer's.

        Args:
            stored: The state.
            step: The step that the state was taken after.
            evaluated_step: The step of the last evaluation.
        """
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
