"""What the probes have written, read back: events by rank, and passes over loaders. Rules look at
nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass
class Pass:
    """One iteration over a loader on one rank. events: all of the rank while it lasted, batches
    included.
    """

    number: int
    about: Event
    events: list[Event] = field(default_factory=list)
    batches: list[Event] = field(default_factory=list)
    end: Event | None = None
    after: int = 0  # place of the first event after it, in the rank's list

    @property
    def at(self) -> Any:
        return self.about.get("at")

    @property
    def built(self) -> Any:
        """The line that made its loader."""
        return self.about.get("built") or self.at

    @property
    def sampler_built(self) -> Any:
        return self.about.get("sampler_built") or self.built

    @property
    def steps(self) -> int:
        return sum(event["k"] == "step" for event in self.events)

    @property
    def is_silent(self) -> bool:
        """Whether no model was called in it: samples are read for something else."""
        return not any(event["k"] == "forward" for event in self.events)

    @property
    def is_training(self) -> bool:
        return any(event["k"] in ("step", "backward") for event in self.events)

    @property
    def is_whole(self) -> bool:
        return self.end is not None and not self.end["cut"]

    @cached_property
    def indices(self) -> list[int] | None:
        """Of the samples read, in order, in the data set below all Subsets."""
        if not self.batches or any(batch["indices"] is None for batch in self.batches):
            return None
        return [index for batch in self.batches for index in batch["indices"]]

    @cached_property
    def rows(self) -> list[str] | None:
        """Hashes of the samples read; nothing where a batch had more rows than were hashed, or
        none.
        """
        if any(len(batch["rows"]) != batch["size"] or not batch["rows"] for batch in self.batches):
            return None
        return [row for batch in self.batches for row in batch["rows"]]


@dataclass
class RankLog:
    """All events of one rank's process, in order; of its data-loader workers beside it."""

    rank: int
    events: list[Event]
    workers: list[Event] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["k"] in kinds]

    @cached_property
    def passes(self) -> list[Pass]:
        found: dict[int, Pass] = {}
        running: list[Pass] = []
        for place, event in enumerate(self.events):
            if event["k"] == "pass":
                found[event["number"]] = Pass(event["number"], event)
                running.append(found[event["number"]])
            elif event["k"] == "batch" and event["number"] in found:
                found[event["number"]].batches.append(event)
            elif event["k"] == "endpass" and event["number"] in found:
                one = found[event["number"]]
                one.end, one.after = event, place + 1
                running = [r for r in running if r is not one]
            if running:
                running[-1].events.append(event)
        return list(found.values())

    @cached_property
    def training(self) -> list[Pass]:
        return [one for one in self.passes if one.is_training]

    @cached_property
    def evaluations(self) -> list[Pass]:
        """Passes without a backward pass in which a model was called."""
        return [
            one
            for one in self.passes
            if not one.is_training
            and any(e["k"] == "forward" and not e["grad"] for e in one.events)
        ]

    @cached_property
    def ended(self) -> bool:
        return any(event["k"] == "exit" for event in self.events)


@dataclass
class Recording:
    """Of one run of the script. ranks: in order.  stalled: nothing had moved for a while, so it was
    ended.
    """

    ranks: list[RankLog]
    world: int
    original: str = ""
    copy: str = ""
    stalled: bool = False
    finished: bool = True  # the script came to its end by itself, on all ranks
    single: bool = False  # a script of one process
    others: list[RankLog] = field(
        default_factory=list
    )  # processes that are no rank: a script that starts its own

    def of(self, *kinds: str) -> list[tuple[int, Event]]:
        return [(log.rank, event) for log in self.ranks for event in log.of(*kinds)]

    def each(self, *kinds: str) -> list[list[Event]]:
        return [log.of(*kinds) for log in self.ranks]

    def keep_first_rank(self) -> None:
        """Forget that there were several ranks: they were copies of one process."""
        self.others += self.ranks[1:]
        self.ranks = self.ranks[:1]
        self.single = True

    @cached_property
    def stopped(self) -> bool:
        """The check had seen enough, or was told to cut epochs short."""
        return bool(self.of("enough")) or any(event["cut"] for _, event in self.of("endpass"))


def read(folder: Path, original: str = "", copy: str = "") -> Recording:
    """All files of a folder of recordings, as they are by now."""
    files = [list(lines_of(path)) for path in sorted(folder.glob("*.jsonl"))]
    files = [events for events in files if events]
    logs: dict[int, RankLog] = {}
    others: list[RankLog] = []
    for events in sorted(files, key=lambda e: not busy(e)):
        rank = rank_of(events)
        if is_worker(events) and rank in logs:
            logs[rank].workers += [event for event in events if event["k"] != "start"]
        elif rank >= 0 and rank not in logs and not is_worker(events):
            logs[rank] = RankLog(rank, events)
        elif not is_worker(events):
            others.append(RankLog(rank, events))
    ranks = [logs[rank] for rank in sorted(logs)]
    known = [
        event["world"] for log in ranks for event in log.of("who", "start") if event["world"] > 0
    ]
    ranks = ranks or others[:1]
    return Recording(
        ranks,
        max(known, default=1),
        original,
        copy,
        others=[log for log in others if log not in ranks],
    )


def busy(events: list[Event]) -> int:
    """Processes that trained, or met in a group, come before those that only started others."""
    return sum(event["k"] in ("who", "step", "coll", "backward") for event in events[:5000])


def is_worker(events: list[Event]) -> bool:
    kinds = Counter(event["k"] for event in events)
    return "fetch" in kinds and not kinds.keys() & {"who", "step", "backward", "pass"}


def rank_of(events: list[Event]) -> int:
    known = [
        event["rank"] for event in events if event["k"] in ("who", "start") and event["rank"] >= 0
    ]
    return int(known[-1]) if known else -1


def lines_of(path: Path) -> Iterator[Event]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # a line that is being written
            yield json.loads(line)
