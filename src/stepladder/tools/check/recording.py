"""The recordings of the probes: events by rank, and passes over loaders. All that rules examine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.tools.check.events import (
    AutogradCall,
    Backward,
    Batch,
    EnoughPasses,
    Fetch,
    Forward,
    GroupJoined,
    OptimizerStep,
    PassEnd,
    PassStart,
    ProcessExit,
    ProcessStart,
    RankOption,
    RankRead,
    Refusal,
    ScriptCollective,
)
from stepladder.tools.probe.events import CodeLine, ProbeEvent

E = TypeVar("E", bound=ProbeEvent)
NOT_BY_WORKERS = (GroupJoined, OptimizerStep, Backward, PassStart)
ACTIVITY_OF_RANKS = (GroupJoined, OptimizerStep, ScriptCollective, Backward)
LOCAL_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "SLURM_LOCALID")
GLOBAL_VARIABLES = ("RANK", "WORLD_SIZE", "get_rank", "get_world_size", "SLURM_PROCID")
EVENTS_OF_ACTIVITY = 5000  # are enough to distinguish processes that train


class EventSequence:
    """Events of one process, in order."""

    events: list[ProbeEvent]

    def select(self, *kinds: type[E]) -> list[E]:
        """Return the events of these kinds."""
        return [event for event in self.events if isinstance(event, kinds)]


@dataclass
class LoaderPass(EventSequence):
    """One iteration over a loader on one rank.

    Args:
        number: Its number on the rank.
        start: The event at its start, which describes the loader.
        events: All events of the rank during the pass, batches included.
        batches: The events of the batches.
        end: The event at its end; None in a pass that was not finished.
        index_after: The index of the first event after the pass, in the rank's list.
        is_by_hand: Whether no loader has cut its batches: they are what a model is called with.
    """

    number: int
    start: PassStart
    events: list[ProbeEvent] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    end: PassEnd | None = None
    index_after: int = 0
    is_by_hand: bool = False

    def finish(self, end: PassEnd, index_after: int) -> None:
        self.end = end
        self.index_after = index_after

    @property
    def line(self) -> CodeLine | None:
        """The line that iterates over the loader."""
        return self.start.at

    @property
    def is_divided(self) -> bool:
        """Whether a sampler, of torch or of Accelerate, divides the samples among the ranks."""
        return (self.start.replicas or 1) > 1

    @property
    def loader_line(self) -> CodeLine | None:
        """The line that made the loader."""
        return self.start.built or self.line

    @property
    def sampler_line(self) -> CodeLine | None:
        """The line that made the sampler."""
        return self.start.sampler_built or self.loader_line

    @property
    def steps(self) -> int:
        return len(self.select(OptimizerStep))

    @property
    def calls_no_model(self) -> bool:
        return not self.select(Forward)

    @property
    def is_training(self) -> bool:
        return bool(self.select(OptimizerStep, Backward))

    @property
    def keeps_no_graph(self) -> bool:
        """Whether a model was called without a gradient, and nothing was trained."""
        return not self.is_training and any(not call.grad for call in self.select(Forward))

    @property
    def takes_gradients(self) -> bool:
        return bool(self.select(Backward, AutogradCall))

    @property
    def evaluated_calls(self) -> list[Forward]:
        """The calls of models in an evaluation: those without a graph, or all if each has one."""
        calls = self.select(Forward)
        return [event for event in calls if not event.grad] or calls

    @property
    def is_complete(self) -> bool:
        return self.end is not None and not self.end.cut

    @cached_property
    def indices(self) -> list[int] | None:
        """The samples that were read, in order, as indices in the data set below all Subsets."""
        if not self.batches or any(batch.indices is None for batch in self.batches):
            return None
        return [index for batch in self.batches for index in batch.indices or []]

    @property
    def samples(self) -> list[int] | list[str] | None:
        """The samples that were read, by index, else by the hash of the row, if that is known."""
        return self.rows if self.indices is None else self.indices

    @cached_property
    def rows(self) -> list[str] | None:
        """The hashes of the samples read; None unless all rows of all batches have one."""
        for batch in self.batches:
            if not batch.rows or len(batch.rows) != batch.size:
                return None
        return [row for batch in self.batches for row in batch.rows]


@dataclass
class RankLog(EventSequence):
    """All events of one rank's process, in order, and those of its data-loader workers."""

    rank: int
    events: list[ProbeEvent]
    worker_events: list[ProbeEvent] = field(default_factory=list)

    def add_worker(self, events: list[ProbeEvent]) -> None:
        """Add the events of a data-loader worker of this rank."""
        self.worker_events += [event for event in events if not isinstance(event, ProcessStart)]

    @cached_property
    def passes(self) -> list[LoaderPass]:
        passes: dict[int, LoaderPass] = {}
        running: list[LoaderPass] = []
        for index, event in enumerate(self.events):
            if isinstance(event, PassStart):
                one_pass = LoaderPass(event.number, event)
                passes[one_pass.number] = one_pass
                running.append(one_pass)
            elif isinstance(event, Batch) and event.number in passes:
                current = passes[event.number]
                current.batches.append(event)
                # Those that a `break` has left do not tell of their end.
                running = [*(one_pass for one_pass in running if one_pass is not current), current]
            elif isinstance(event, PassEnd) and event.number in passes:
                ended = passes[event.number]
                ended.finish(event, index + 1)
                running = [one_pass for one_pass in running if one_pass is not ended]
            if running:
                running[-1].events.append(event)
        return list(passes.values())

    @cached_property
    def training_passes(self) -> list[LoaderPass]:
        return [one_pass for one_pass in self.passes if one_pass.is_training]

    @cached_property
    def all_passes(self) -> list[LoaderPass]:
        """The passes over loaders, and those over the script's own batches if it trains on them."""
        if self.training_passes:
            return self.passes
        known = {id(event) for one_pass in self.passes for event in one_pass.events}
        others = [item for item in enumerate(self.events) if id(item[1]) not in known]
        return [*self.passes, *passes_by_hand(others)]

    @cached_property
    def evaluation_passes(self) -> list[LoaderPass]:
        """The passes in which a model is evaluated, also those without `no_grad`."""
        return [p for p in self.passes if p.keeps_no_graph or self.evaluates_with_graph(p)]

    def evaluates_with_graph(self, one_pass: LoaderPass) -> bool:
        """Return whether a pass calls a model, and its loader is not one that is trained on."""
        trained_loaders = {training_pass.start.loader for training_pass in self.training_passes}
        is_training_data = not trained_loaders or one_pass.start.loader in trained_loaders
        if is_training_data or one_pass.takes_gradients or one_pass.calls_no_model:
            return False
        return one_pass.is_complete and not self.is_followed_by_backward(one_pass)

    def events_until_training(self, one_pass: LoaderPass) -> Iterator[ProbeEvent]:
        """Yield the events after a pass, until the next backward pass."""
        for event in self.events[one_pass.index_after :]:
            if isinstance(event, Backward):
                return
            yield event

    def is_followed_by_backward(self, one_pass: LoaderPass) -> bool:
        """Return whether a backward pass comes before the next pass over a loader."""
        following = self.events[one_pass.index_after :]
        first = next((e for e in following if isinstance(e, Backward | PassStart)), None)
        return isinstance(first, Backward)

    @cached_property
    def has_ended(self) -> bool:
        return bool(self.select(ProcessExit))


@dataclass(frozen=True)
class Recording:
    """The recording of one run of the script.

    Args:
        ranks: The events of each rank, in the order of ranks.
        world_size: The number of ranks of the process group.
        original: The working folder.
        copy: The copy of it in which the script ran.
        has_stalled: Whether the run was ended because nothing had happened for a while.
        deadlock: Why ranks could not go on together, where that is certain.
        has_raised: Whether a rank has failed by an exception that tells of no other rank: then no
            rule has to explain why the others did not go on.
        has_finished: Whether the script ended by itself, on all ranks.
        is_single_process: Whether the script was run as one process.
        other_processes: Processes that are no rank, of a script that starts its own.
    """

    ranks: list[RankLog]
    world_size: int
    original: str = ""
    copy: str = ""
    has_stalled: bool = False
    deadlock: Explanation | None = None
    has_raised: bool = False
    has_finished: bool = True
    is_single_process: bool = False
    other_processes: list[RankLog] = field(default_factory=list)

    def select(self, *kinds: type[E]) -> list[tuple[int, E]]:
        """Return the events of these kinds on all ranks, each with its rank."""
        return [(log.rank, event) for log in self.ranks for event in log.select(*kinds)]

    @cached_property
    def ranks_asked_for(self) -> set[str]:
        """The variables and functions by which the script, or a library, has asked for a rank."""
        names = {event.name for _, event in self.select(RankRead)}
        return names | {event.variable for _, event in self.select(RankOption)}

    @property
    def asks_for_local_rank(self) -> bool:
        return not self.ranks_asked_for.isdisjoint(LOCAL_VARIABLES)

    @property
    def is_for_one_node(self) -> bool:
        """Whether a script takes its local rank for its rank, and knows of no other node."""
        return self.asks_for_local_rank and self.ranks_asked_for.isdisjoint(GLOBAL_VARIABLES)

    @cached_property
    def was_cut_short(self) -> bool:
        """Whether the check ended the run, or was told to end epochs early."""
        is_cut = any(event.cut for _, event in self.select(PassEnd))
        return is_cut or bool(self.select(EnoughPasses))

    def as_single_process(self) -> Recording:
        """Return the recording with the first rank only: the other ranks were copies of it."""
        return replace(
            self,
            ranks=self.ranks[:1],
            other_processes=[*self.other_processes, *self.ranks[1:]],
            is_single_process=True,
        )


def passes_by_hand(events: Iterable[tuple[int, ProbeEvent]]) -> Iterator[LoaderPass]:
    """Yield the passes of a script that trains with batches of its own: series of calls of models.

    A pass ends where models are called for gradients no longer, or again, but for a call before
    the backward pass of another, as of a teacher. A model that is in training mode at other times
    is called for none in the other mode. What a model is called with first, after a backward pass
    or a step, is a batch.

    Args:
        events: The events outside of the passes of loaders, with their indices.
    """
    one_pass: LoaderPass | None = None
    index, keeps_graph, is_next_batch, awaits_backward = 0, True, True, False
    modes: dict[int, int] = {}
    for number, event in events:
        trains = isinstance(event, Forward) and _is_for_gradients(event, modes)
        is_other_call = isinstance(event, Forward) and trains is not keeps_graph
        if one_pass and ((is_other_call and not awaits_backward) or number > index + 1):
            one_pass.finish(PassEnd(number=one_pass.number, cut=False), index + 1)
            yield one_pass
            one_pass = None
        index = number
        if isinstance(event, Forward):
            if one_pass is None:
                start = PassStart(
                    number=-index, at=event.at, loader=event.root, batch_size=event.size
                )
                one_pass = LoaderPass(-index, start, is_by_hand=True)
                keeps_graph, is_next_batch = trains, True
            if is_next_batch:
                rows = list(event.rows)
                batch = Batch(
                    number=-index, indices=None, rows=rows, size=event.size, sums=event.sums
                )
                one_pass.batches.append(batch)
                one_pass.events.append(batch)
            is_next_batch = not keeps_graph
            awaits_backward |= trains
        awaits_backward &= not isinstance(event, Backward)
        is_next_batch |= isinstance(event, Backward | OptimizerStep)
        if one_pass:
            one_pass.events.append(event)
    if one_pass:
        yield one_pass


def _is_for_gradients(event: Forward, modes: dict[int, int]) -> bool:
    """Return whether a call is for gradients; add to the modes of models until then.

    A wrapper and the model inside of it are told by the number of their layers that have modes.
    """
    modes[event.moded] = max(event.moded_on, modes.get(event.moded, 0))
    return event.grad and (event.moded_on > 0 or not modes[event.moded])


def group_events(events: Iterable[E], field_name: str) -> dict[Any, list[E]]:
    """Return events grouped by one of their fields, in the order of their first event."""
    groups: dict[Any, list[E]] = defaultdict(list)
    for event in events:
        groups[getattr(event, field_name)].append(event)
    return groups


def read_recording(folder: Path, original: str = "", copy: str = "") -> Recording:
    """Return all recordings of a folder, as far as they are written."""
    # Ranks before the processes that made them; else in the order in which they were started.
    paths = sorted(folder.glob("*.jsonl"), key=process_of)
    recorded = {process_of(path): list(read_events(path)) for path in paths}
    processes = sorted(recorded, key=lambda process: not has_trained(recorded[process]))
    by_process: dict[int, RankLog] = {}
    by_rank: dict[int, RankLog] = {}
    other_processes: list[RankLog] = []
    for process in processes:
        events = recorded[process]
        if not events or is_worker(events):
            continue
        log = RankLog(rank_of(events), events)
        by_process[process] = log
        if log.rank >= 0 and log.rank not in by_rank:
            by_rank[log.rank] = log
        else:
            other_processes.append(log)
    for events in recorded.values():
        parent = by_process.get(parent_of_worker(events))
        if parent is not None:
            parent.add_worker(events)
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    world_sizes = [event.world for log in ranks for event in log.select(ProcessStart)]
    if not ranks:
        ranks = other_processes[:1]
        other_processes = other_processes[1:]
    world_size = max((size for size in world_sizes if size > 0), default=1)
    return Recording(ranks, world_size, original, copy, other_processes=other_processes)


def process_of(path: Path) -> int:
    """Return the process that has written a recording."""
    return int(path.stem)


def has_trained(events: list[ProbeEvent]) -> bool:
    """Return whether a process has trained, or joined a group: one that starts others has not."""
    return any(isinstance(event, ACTIVITY_OF_RANKS) for event in events[:EVENTS_OF_ACTIVITY])


def is_worker(events: list[ProbeEvent]) -> bool:
    """Return whether the events are those of a data-loader worker."""
    has_fetched = any(isinstance(event, Fetch) for event in events)
    return has_fetched and not any(isinstance(event, NOT_BY_WORKERS) for event in events)


def parent_of_worker(events: list[ProbeEvent]) -> int:
    """Return the process whose loader made a worker; -1 of a process that is no worker.

    A worker may not know the rank: one that is a new interpreter has no process group.
    """
    if not is_worker(events):
        return -1
    return next(event.parent for event in events if isinstance(event, Fetch))


def rank_of(events: list[ProbeEvent]) -> int:
    """Return the rank that a process has said last; -1 where it has none."""
    ranks = [event.rank for event in events if isinstance(event, ProcessStart)]
    return next((rank for rank in reversed(ranks) if rank >= 0), -1)


def read_events(path: Path) -> Iterator[ProbeEvent]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # a line that is being written
            yield ProbeEvent.from_line(line)


def read_refused_paths(folder: Path) -> list[str]:
    """Return the paths outside the copy whose change was refused."""
    events = [event for path in folder.glob("*.jsonl") for event in read_events(path)]
    return sorted({event.path for event in events if isinstance(event, Refusal)})
