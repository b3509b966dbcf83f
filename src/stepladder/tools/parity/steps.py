"""The optimizer steps of one run of the script: the samples of each, and the tensors around it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan

from stepladder.tools.check.events import (
    Backward,
    Batch,
    Clipping,
    Draw,
    Fetch,
    Forward,
    OptimizerStep,
    PassStart,
    ScriptCollective,
)
from stepladder.tools.check.recording import EventSequence, RankLog, Recording
from stepladder.tools.parity.events import StepValues
from stepladder.tools.probe.events import CodeLine, ProbeEvent

Sample = tuple[str, ...]  # what identifies a sample
Tensors = dict[str, list[float]]  # by name: the norm, and then some elements


@dataclass
class RankStep(EventSequence):
    """One optimizer step on one rank, with what has led to it.

    Args:
        epoch: The number of the training pass that it is in, from 0.
        events: The events of the rank since the step before.
        end: The event of the step.
        values: The values of tensors around it.
    """

    epoch: int
    events: list[ProbeEvent]
    end: OptimizerStep
    values: StepValues | None = None

    def add_values(self, values: StepValues) -> None:
        self.values = values

    @cached_property
    def losses(self) -> list[float]:
        return [event.loss for event in self.select(Backward) if event.loss is not None]

    @cached_property
    def backward_line(self) -> CodeLine | None:
        backwards = self.select(Backward)
        return backwards[-1].at if backwards else self.end.at

    @cached_property
    def inputs(self) -> list[Forward]:
        """The calls of models on data: the first after each backward pass, or after a step.

        The inputs of other calls may be the outputs of these.
        """
        calls: list[Forward] = []
        is_first = True
        for event in self.events:
            if isinstance(event, Forward) and event.grad:
                if is_first:
                    calls.append(event)
                is_first = False
            elif isinstance(event, Backward):
                is_first = True
        return calls

    @property
    def input_rows(self) -> Counter[str]:
        return Counter(row for call in self.inputs for row in call.rows)

    @property
    def clips_early(self) -> bool:
        """Whether gradients are clipped before they are exchanged, or before the last backward."""
        clipped: set[int] = set()
        for event in self.events:
            if isinstance(event, Clipping):
                clipped.update(event.ptrs)
            elif clipped and isinstance(event, Backward):
                return True
            elif clipped and isinstance(event, ScriptCollective):
                is_large = bool(event.count) and not event.value
                if is_large or event.ptr in clipped:
                    return True
        return False


@dataclass(frozen=True)
class Samples:
    """The samples of a global batch, as numbers in the data set and as hashes of their values."""

    count: int = 0
    numbers: Counter[Sample] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Samples) -> Samples:
        count = self.count + other.count
        return Samples(count, self.numbers + other.numbers, self.rows + other.rows)

    def is_same(self, other: Samples) -> bool:
        """Return whether the samples are the same, by one of the two ways to identify them."""
        has_same_rows = self.rows.total() == self.count and self.rows == other.rows
        has_same_numbers = self.numbers.total() == self.count and self.numbers == other.numbers
        return self.count == other.count and (has_same_rows or has_same_numbers)

    @property
    def is_identified(self) -> bool:
        """Whether each sample is known, by its number or by its values."""
        return self.count in (self.rows.total(), self.numbers.total())

    @property
    def repeated(self) -> int:
        """The number of samples that are in it more than once."""
        identified = self.rows if self.rows.total() == self.count else self.numbers
        return sum(count - 1 for count in identified.values())


@dataclass(frozen=True)
class GlobalStep:
    """One optimizer step on all ranks.

    Args:
        number: Its number among all steps of the run, from 1.
        ranks: The step on each rank.
        samples: The samples of its global batch.
        sizes: The number of samples of each rank.
    """

    number: int
    ranks: list[RankStep]
    samples: Samples
    sizes: list[int]

    @property
    def first(self) -> RankStep:
        return self.ranks[0]

    @property
    def epoch(self) -> int:
        return self.first.epoch

    @property
    def rates(self) -> list[float]:
        return self.first.end.lr

    @cached_property
    def rank_losses(self) -> list[float]:
        """The loss of each rank: the sum over the backward passes of the step."""
        return [sum(step.losses) for step in self.ranks if step.losses]

    @property
    def loss(self) -> float | None:
        """The mean of the ranks' losses; None where it is not known."""
        losses = self.rank_losses
        if len(losses) < len(self.ranks) or any(map(isnan, losses)):
            return None
        return sum(losses) / len(losses)

    @property
    def input_rows(self) -> Counter[str]:
        """The hashes of all that models were called on."""
        return sum((step.input_rows for step in self.ranks), Counter())

    @property
    def values(self) -> StepValues | None:
        return self.first.values

    @property
    def grads(self) -> Tensors:
        return self.values.grads if self.values is not None else {}

    @property
    def weights(self) -> Tensors:
        return self.values.weights if self.values is not None else {}

    def count_calls(self) -> dict[str, int]:
        """Return how often layers were called whose results differ by rank."""
        values = [step.values for step in self.ranks if step.values is not None]
        return {
            "dropout": sum(of_rank.dropouts for of_rank in values),
            "batch-norm": sum(of_rank.norms for of_rank in values),
        }


@dataclass(frozen=True)
class RunSteps:
    """All steps of one run.

    Args:
        recording: What was recorded.
        steps: The steps, as far as all ranks have made them.
        augments: Whether random numbers were drawn while samples were fetched.
    """

    recording: Recording
    steps: list[GlobalStep]
    augments: bool

    @property
    def world_size(self) -> int:
        return len(self.recording.ranks)

    @property
    def steps_of_first_epoch(self) -> int:
        return sum(step.epoch == self.steps[0].epoch for step in self.steps)

    def find_loop_draw(self, step: GlobalStep) -> Draw | None:
        """Return a draw of random numbers in a step, at a line that draws in other steps too."""
        other_steps = [run_step for run_step in self.steps if run_step is not step]
        lines = {draw.at for run_step in other_steps for draw in run_step.first.select(Draw)}
        return next((draw for draw in step.first.select(Draw) if draw.at in lines), None)

    @property
    def initial(self) -> Tensors:
        """The weights before the first step."""
        initial: Tensors = {}
        for step in self.steps:
            if step.values is not None:
                initial |= step.values.initial
        return initial


def read_steps(recording: Recording) -> RunSteps:
    """Return the steps of a recording."""
    logs = recording.ranks
    steps_of_ranks = [list_rank_steps(log) for log in logs]
    steps = []
    for number, ranks in enumerate(zip(*steps_of_ranks, strict=False), 1):
        samples = [samples_of_step(step, log) for step, log in zip(ranks, logs, strict=True)]
        sizes = [of_rank.count for of_rank in samples]
        steps.append(GlobalStep(number, list(ranks), sum(samples, Samples()), sizes))
    events = [event for log in logs for event in [*log.events, *log.worker_events]]
    augments = any(isinstance(event, Fetch) and event.used for event in events)
    return RunSteps(recording, steps, augments)


def list_rank_steps(log: RankLog) -> list[RankStep]:
    epochs = {loader_pass.number: epoch for epoch, loader_pass in enumerate(log.training_passes)}
    steps: list[RankStep] = []
    events: list[ProbeEvent] = []
    epoch = 0
    for event in log.events:
        if isinstance(event, Batch) and event.number in epochs:
            epoch = epochs[event.number]
        if isinstance(event, StepValues):
            if steps:
                steps[-1].add_values(event)
            continue
        events.append(event)
        if isinstance(event, OptimizerStep):
            steps.append(RankStep(epoch, events, event))
            events = []
    return steps


def samples_of_step(step: RankStep, log: RankLog) -> Samples:
    """Return the samples of a step on one rank: of its loaders, or of its model's inputs."""
    starts = {loader_pass.number: loader_pass.start for loader_pass in log.training_passes}
    batches = [batch for batch in step.select(Batch) if batch.number in starts]
    if batches:
        total = Samples()
        for batch in batches:
            total += samples_of_batch(batch, starts[batch.number])
        return total
    return Samples(sum(call.size for call in step.inputs), rows=step.input_rows)


def samples_of_batch(batch: Batch, start: PassStart) -> Samples:
    numbers = [(start.fingerprint, str(index)) for index in batch.indices or []]
    return Samples(batch.size, Counter(numbers), Counter(batch.rows))
