"""What one run of a script has shown: which lines make, use, show and write what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stepladder.tools.check.events import (
    OBJECT_OF,
    Backward,
    CarriedState,
    CoupledSamples,
    FileAppend,
    FileMove,
    FileRemoval,
    FileWrite,
    FolderMade,
    Forward,
    NamesInUse,
    NamesWhereBuilt,
    Print,
    RowNames,
    Statistic,
)
from stepladder.tools.check.recording import LoaderPass, RankLog, Recording
from stepladder.tools.findings.finding import Location
from stepladder.tools.probe.events import CodeLine, ProbeEvent

NamedModel = tuple[str, int, list[int]]  # the name of a model, its id and those of its parts
NUMBERS_OF_PROCESSES = (2, 3, 5)


class Use(NamedTuple):
    """A function that uses an object: the line, the function, and its name for the object."""

    location: Location
    function: str
    name: str


@dataclass(frozen=True)
class LoaderFacts:
    """The passes over the loaders that one line makes, of those that train or of the others.

    Args:
        built: The line.
        passes: The passes.
        uses: The functions that use the loaders.
        built_from: The lines that led there.
        others: Those of the same line that are used otherwise: some train, and others do not.
        is_told_by_order: Whether its loaders shuffle if they train, and only then.
    """

    built: Location
    passes: list[LoaderPass]
    uses: list[tuple[Use, ...]]
    built_from: set[Location]
    others: list[LoaderPass]
    is_told_by_order: bool = True

    @property
    def is_by_hand(self) -> bool:
        """Whether it is no loader, but the script itself, that cuts batches."""
        return self.passes[0].is_by_hand

    @property
    def is_training(self) -> bool:
        return any(one_pass.is_training for one_pass in self.passes)

    @property
    def training_uses(self) -> list[tuple[Use, ...]]:
        """The uses at the lines of passes that train: an evaluation may read the loader, too."""
        lines = {p.line.line for p in self.passes if p.is_training and p.line}
        return [use for use in self.uses if self.is_by_hand or use[0].location.line in lines]

    def turns(self, number: int) -> tuple[set[int], set[int]]:
        """Return which of a number of calls, in turn, make these loaders, and which the others."""
        of_loaders, of_others = (
            {one_pass.start.built_before % number for one_pass in passes} if number else set()
            for passes in (self.passes, self.others)
        )
        return of_loaders, of_others


class ScriptFacts:
    """What a run on one process has shown.

    Args:
        recording: The recording of the run.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.log: RankLog = recording.ranks[0]

    def location(self, line: CodeLine) -> Location:
        """Return a recorded line, by the file's path in the folder."""
        name = line.file
        for root in (self.recording.copy, self.recording.original):
            name = name.removeprefix(f"{root}/")
        return Location(name, line.line)

    def uses_of(
        self, what: str, object_id: int, in_training: bool = False
    ) -> list[tuple[Use, ...]]:
        """Return the uses of an object, each from the innermost function outwards."""
        return [
            self.uses_in(event)
            for event in (self.training_events if in_training else self.log.events)
            if isinstance(event, NamesInUse) and event.what == what and event.object == object_id
        ]

    def uses_in(self, event: NamesInUse) -> tuple[Use, ...]:
        """Return the functions of a use, from the innermost one outwards."""
        return tuple(Use(self.location(CodeLine(*use[:3])), use[2], use[3]) for use in event.uses)

    @cached_property
    def loaders(self) -> list[LoaderFacts]:
        """The loaders that are iterated, by the lines that make them."""
        trained = {
            one_pass.start.loader for one_pass in self.log.all_passes if one_pass.is_training
        }
        passes: dict[tuple[Location, bool], list[LoaderPass]] = {}
        strange = set[Location]()
        for one_pass in self.log.all_passes:
            # What is read for no model, as for a mean of all, is read by each process.
            if one_pass.loader_line and (one_pass.is_training or not one_pass.calls_no_model):
                built = self.location(one_pass.loader_line)
                trains = one_pass.start.loader in trained
                passes.setdefault((built, trains), []).append(one_pass)
                strange |= {built} if one_pass.start.shuffle is not trains else set()
        return [
            LoaderFacts(
                built,
                of,
                list(self.uses_of_passes(of)),
                {self.location(CodeLine(*line)) for p in of for line in p.start.built_from},
                passes.get((built, not trains), []),
                is_told_by_order=built not in strange,
            )
            for (built, trains), of in passes.items()
        ]

    @cached_property
    def num_processes(self) -> int:
        """The smallest number of processes that have equal shares of each training batch.

        If none of a few has: 2.
        """
        starts = [one_pass.start for one_pass in self.log.all_passes if one_pass.is_training]
        size = math.gcd(*(start.batch_size or 0 for start in starts))
        return next((number for number in NUMBERS_OF_PROCESSES if size % number == 0), 2)

    @cached_property
    def has_smaller_batches(self) -> bool:
        """Whether batches of a pass have different sizes, as where the last one is smaller."""
        trained = [one_pass for one_pass in self.log.all_passes if one_pass.is_training]
        return any(len({batch.size for batch in one_pass.batches}) > 1 for one_pass in trained)

    def uses_of_passes(self, passes: Iterable[LoaderPass]) -> Iterator[tuple[Use, ...]]:
        """Yield the uses of loaders; without one, those of the optimizers that step instead."""
        passes = list(passes)
        for one_pass in (item for item in passes if item.is_by_hand):
            for event in one_pass.select(NamesInUse):
                if event.what == "optimizer":
                    yield self.uses_in(event)
        for loader in dict.fromkeys(one_pass.start.loader for one_pass in passes):
            yield from self.uses_of("loader", loader)

    @cached_property
    def trained_models(self) -> list[int]:
        """The ids of the models that are called for gradients, but for parts of others."""
        called = dict.fromkeys(event.root for event in self.training_calls)
        named = [model for _, models in self.optimizer_places for model in models]
        parts = {part for _, model, parts in named if model in called for part in parts}
        return [model for model in called if model not in parts]

    @cached_property
    def parts_of_named_models(self) -> set[int]:
        """The models that are attributes of others where an optimizer is made, such as `self`."""
        named = [item for _, models in self.optimizer_places for item in models]
        return {part for _, model, parts in named for part in parts if part != model}

    @cached_property
    def model_names(self) -> set[str]:
        """The names that functions have for the trained models."""
        names = {
            use.name
            for model in self.trained_models
            for uses in self.uses_of("model", model)
            for use in uses
        }
        names |= {
            name
            for _, models in self.optimizer_places
            for name, model, _ in models
            if model in self.trained_models
        }
        return names - {"", "self"}  # which has no wrapper

    @cached_property
    def names_of_objects(self) -> set[str]:
        """The names that functions have for objects of the user's classes."""
        events = [e for e in self.log.select(NamesInUse) if e.what.startswith(OBJECT_OF)]
        return {use.name for event in events for use in self.uses_in(event)} - {""}

    @cached_property
    def training_events(self) -> list[ProbeEvent]:
        return [
            event
            for one_pass in self.log.all_passes
            if one_pass.is_training
            for event in one_pass.events
        ]

    @cached_property
    def training_calls(self) -> list[Forward]:
        """The calls of models in training passes that keep a graph."""
        return [
            event for event in self.training_events if isinstance(event, Forward) and event.grad
        ]

    @cached_property
    def names_of_rows(self) -> dict[Location, set[str]]:
        """The names of what has the rows of a batch, by the lines that call a model for a step."""
        lines = {event.at for event in self.training_calls}
        names: dict[Location, set[str]] = {}
        for event in self.log.select(RowNames):
            if event.at and event.at in lines:
                found = names.setdefault(self.location(event.at), {*event.names})
                found &= {*event.names}
        return names

    @cached_property
    def means_in_training(self) -> list[Location]:
        """The lines that compute a loss, or another mean, for a step."""
        means = [e.at for e in self.training_events if isinstance(e, Statistic) and e.is_mean]
        return list(dict.fromkeys(self.location(line) for line in means if line))

    @cached_property
    def sums_in_training(self) -> set[Location]:
        """The lines that compute a sum for a step, as over a mask."""
        sums = [e.at for e in self.training_events if isinstance(e, Statistic) and not e.is_mean]
        return {self.location(line) for line in sums if line}

    @cached_property
    def calls_that_train_nothing(self) -> set[Location]:
        """The lines that call trained models, and never for a step."""
        for_a_step = {self.location(event.at) for event in self.training_calls if event.at}
        calls = [e for e in self.log.select(Forward) if e.root in self.trained_models]
        return {self.location(event.at) for event in calls if event.at} - for_a_step

    @cached_property
    def models_with_batch_norm(self) -> set[int]:
        return {event.root for event in self.log.select(Forward) if event.norms}

    @cached_property
    def optimizer_places(self) -> list[tuple[Location, list[NamedModel]]]:
        """The lines that run where optimizers are made, each time the innermost first."""
        return [
            (self.location(CodeLine(*line)), models)
            for event in self.log.select(NamesWhereBuilt)
            for *line, models in event.places
        ]

    @cached_property
    def training_stacks(self) -> list[tuple[Use, ...]]:
        """The functions that run during the training, from the innermost outwards."""
        return [uses for loader in self.loaders if loader.is_training for uses in loader.uses]

    @cached_property
    def shown_lines(self) -> set[Location]:
        """The lines that show something, and those that call the functions that do."""
        lines = [line for event in self.log.select(Print) for line in (event.at, event.caller)]
        return {self.location(line) for line in lines if line}

    @cached_property
    def backwards(self) -> list[Location]:
        return self.locations(Backward)

    @cached_property
    def carried(self) -> list[Location]:
        return self.locations(CarriedState)

    @cached_property
    def coupled(self) -> list[Location]:
        return self.locations(CoupledSamples)

    @cached_property
    def coupled_calls(self) -> list[Location]:
        """The lines that call the models whose outputs a loss compares."""
        events = self.log.select(CoupledSamples)
        calls = [call for event in events for call in event.calls]
        return list(dict.fromkeys(self.location(CodeLine(*call)) for call in calls))

    @cached_property
    def writes(self) -> list[Location]:
        return self.locations(FileWrite, FileAppend, FileMove, FileRemoval)

    @cached_property
    def folders(self) -> list[Location]:
        return self.locations(FolderMade)

    def locations(self, *kinds: type[ProbeEvent]) -> list[Location]:
        lines = [event.at for event in self.log.select(*kinds) if event.at]
        return list(dict.fromkeys(map(self.location, lines)))
