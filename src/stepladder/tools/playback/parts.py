"""What each rank of a recorded run did, from one batch to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from stepladder.tools.check.events import (
    Backward,
    Batch,
    BeforeStep,
    Clipping,
    Draw,
    FileWrite,
    Forward,
    LeafGradients,
    OptimizerStep,
    PassStart,
    Print,
    Save,
    ScheduleStep,
    ScriptCollective,
)
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import RunEvidence
from stepladder.tools.probe.events import ProbeEvent

Moment = Literal["samples", "loss", "gradients", "meeting", "step", "shown"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
MOMENT_OF_EVENT: dict[type[ProbeEvent], Moment] = {
    PassStart: "samples",
    Batch: "samples",
    Draw: "samples",
    Forward: "loss",
    Backward: "gradients",
    Clipping: "gradients",
    ScriptCollective: "meeting",
    BeforeStep: "step",
    OptimizerStep: "step",
    ScheduleStep: "step",
    Print: "shown",
    Save: "shown",
    FileWrite: "shown",
}


@dataclass
class Part:
    """What one rank did from one training batch to the next, or in an evaluation.

    Args:
        epoch: The number of training passes that have begun before; the first epoch is 0.
        number: The number of the step in its epoch, from 1; 0 in an evaluation.
        samples: The samples that it read, by their number, else by a hash.
        rows: The name in `samples` of each row's hash, which tells equal samples on all ranks.
        losses: The loss of each backward pass.
        layers: The names of the first parameters.
        own: For each of these, a sum of the gradient that this rank computed.
        exchanged: The same, of the gradient with which the optimizer made its step.
        weights: The hash of each parameter after the step.
        meetings: The collectives that the script called, with their lines.
        printed: What it printed.
        lines: The file and line of each moment's events.
    """

    epoch: int
    number: int = 0
    samples: list[str] = field(default_factory=list)
    rows: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    exchanged: list[float] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    meetings: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    lines: dict[tuple[str, int], Moment] = field(default_factory=dict)

    @property
    def has_stepped(self) -> bool:
        return bool(self.weights or self.exchanged)

    def add(self, event: ProbeEvent) -> None:
        """Note what an event tells."""
        if isinstance(event, Batch):
            names = [row[:4] for row in event.rows]
            if event.indices is not None:
                names = list(map(str, event.indices))
            self.samples += names
            self.rows |= dict(zip(event.rows, names, strict=False))
        elif isinstance(event, Backward) and event.loss is not None:
            self.losses.append(event.loss)
        elif isinstance(event, LeafGradients):
            self.own = event.sums
        elif isinstance(event, BeforeStep):
            self.layers = list(event.ids)[: len(event.sums)]
            self.exchanged = list(event.sums)
        elif isinstance(event, OptimizerStep):
            self.weights |= event.after
        elif isinstance(event, Print):
            self.printed += event.text.splitlines()


def read_parts(log: RankLog, evidence: RunEvidence) -> list[Part]:
    """Return the parts of a rank's run, in their order."""
    epochs = {one.number: epoch for epoch, one in enumerate(log.training_passes)}
    part = Part(-1)
    parts = [part]
    for event in log.events:
        part = _find_part(part, event, epochs)
        if part is not parts[-1]:
            parts.append(part)
        part.add(event)
        if event.at and type(event) in MOMENT_OF_EVENT:
            place = evidence.location(event.at)
            part.lines.setdefault((place.file, place.line), MOMENT_OF_EVENT[type(event)])
            if isinstance(event, ScriptCollective):
                part.meetings.append(f"{event.op} ({place.file}:{place.line})")
            if isinstance(event, PassStart):
                for built in filter(None, (event.built, event.sampler_built)):
                    place = evidence.location(built)
                    part.lines.setdefault((place.file, place.line), "samples")
    return [part for part in parts if part.samples or part.has_stepped or part.printed]


def _find_part(part: Part, event: ProbeEvent, epochs: dict[int, int]) -> Part:
    """Return the part to which an event belongs: a new one, where it begins one.

    Args:
        part: The part of the event before.
        event: The event.
        epochs: The epoch of each training pass; empty in a script without loaders.
    """
    is_over = part.has_stepped or not part.number
    if isinstance(event, PassStart):
        if event.number not in epochs:
            return Part(part.epoch)
        return Part(epochs[event.number], 1)
    if isinstance(event, Batch) and event.number in epochs and is_over:
        epoch = epochs[event.number]
        return Part(epoch, part.number * (part.epoch == epoch) + 1)
    if isinstance(event, Backward) and not epochs and is_over:
        return Part(0, part.number + 1)
    return part


def choose_parts(
    parts_of_ranks: Sequence[Sequence[Part]], steps: int, epochs: int
) -> list[tuple[Part, ...]]:
    """Return the parts that are shown, each with those of all ranks.

    Args:
        parts_of_ranks: The parts of each rank.
        steps: How many steps of an epoch are shown: the first ones, and its last one, after which
            a script often prints and saves.
        epochs: How many epochs are shown.
    """
    together = list(zip(*parts_of_ranks, strict=False))
    last = {parts[0].epoch: number for number, parts in enumerate(together) if parts[0].number}
    return [
        parts
        for number, parts in enumerate(together)
        if parts[0].epoch < epochs and (parts[0].number <= steps or last[parts[0].epoch] == number)
    ]
