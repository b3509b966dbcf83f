"""Both runs trained again up to the step that differs: which of them repeats itself, and what
differs first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from stepladder.tools.diff import again
from stepladder.tools.diff.again import Again, Event, first_unlike, start_of, train_again
from stepladder.tools.diff.records import (
    ENVIRONMENT,
    TOLERANCE,
    Kept,
    Records,
    Unlike,
    in_step,
    steps_in,
    unlike_tensors,
)
from stepladder.tools.diff.verdict import Answer, said, without_training

NOT_REPEATABLE, WRONG, NEITHER = "not repeatable", "wrong result", "not reproduced"
TEXTS = {
    again.INITIAL: "before the first step {name} differs",
    again.START: "before the step {name} differs",
    again.DATA: "{name}{where} holds other numbers",
    again.RANDOM: "{name}{where} has another state, and all before it is equal",
    again.OPERATION: "{name}{where} differs, and all before it is equal",
    again.LOSS: "{name}{where} differs, and the output of every module is equal",
    again.GRADIENT: "the gradient of {name}{where} differs, and the loss is equal",
    again.RATE: "{name} differs",
    again.OPTIMIZER: "{name} differs, and all before it is equal",
}


class Retrial:
    """Trains in `folder`, each run once, and a second time where it does not repeat its own
    records.
    """

    def __init__(self, records: Records, found: Answer, folder: Path) -> None:
        self.records, self.found, self.folder = records, replace(found, trained_again=True), folder
        self.trainings = 0

    def verdict(self) -> Answer:
        first, last, both = self._up_to(self.found.step or 1)
        broken: dict[Kept, int] = {}
        for kept, done in zip(self.records.both, both, strict=True):
            if (step := self._not_repeated(kept, done, last)) is not None:
                broken[kept] = step
                if found := first_unlike(done, self._train(kept, done.start, first, last)):
                    return self._not_repeatable(kept, found)
        if found := first_unlike(*both):
            return self._by_event(found, broken)
        return self._all_repeated_alike(
            replace(self.found, step=min(broken.values(), default=last)), list(broken)
        )

    def _all_repeated_alike(self, found: Answer, broken: list[Kept]) -> Answer:
        """Where both were trained to the same bits, and these runs have other records."""
        known = without_training(self.records, found)
        if not broken or known.kind in ENVIRONMENT.values():
            return known
        if len(broken) == 2:
            return neither(found)
        [kept] = broken
        why = (
            f"{kept.run_dir} does not repeat its own step {found.step}, and the other run does: its memory or"
            " arithmetic went wrong there, or its job file, data or machine was changed since"
        )
        return said(found, WRONG, str(kept.run_dir), why, str(kept.run_dir))

    def _up_to(self, last: int) -> tuple[int, int, list[Again]]:
        """First and last step watched, and both trainings. Earlier steps, where these begin with
        other weights.
        """
        while True:
            starts = [start_of(kept, last) for kept in self.records.both]
            first = max(max(starts), last - again.MOST_STEPS) + 1
            both = [
                self._train(kept, at, first, last)
                for kept, at in zip(self.records.both, starts, strict=True)
            ]
            found = first_unlike(*both)
            if (
                first == 1
                or found is None
                or again.START not in [event.kind for event in found if event]
            ):
                return first, last, both
            last = first - 1

    def _train(self, kept: Kept, start: int, first: int, last: int) -> Again:
        self.trainings += 1
        return train_again(kept, start, (first, last), self.folder / f"training-{self.trainings}")

    def _not_repeated(self, kept: Kept, done: Again, last: int) -> int | None:
        """The first step that the run's own records have otherwise."""
        tolerance = 0.0 if kept.exact else TOLERANCE
        for recorded, repeated in in_step(kept.steps(), steps_in(done.folder)):
            if not math.isclose(recorded["loss"], repeated["loss"], rel_tol=tolerance):
                return int(recorded["step"])
        paths = kept.snapshots().get(last), Kept(done.folder).snapshots().get(last)
        unlike = None not in paths and unlike_tensors(last, paths, tolerance, kept.problems)  # type: ignore[arg-type]
        return last if unlike else None

    def _by_event(
        self, found: tuple[Event | None, Event | None], broken: dict[Kept, int]
    ) -> Answer:
        event, text, row = told(*found)
        if broken:
            text += f" (trained again; {' and '.join(str(kept.run_dir) for kept in broken)} had other losses)"
        known = replace(self.found, step=event.step, records=[*self.found.records, row])
        return said(known, event.kind, event.name, text)

    def _not_repeatable(self, kept: Kept, found: tuple[Event | None, Event | None]) -> Answer:
        event, text, row = told(*found)
        why = (
            f"{kept.run_dir} gives another result each time it is trained: {text}; a non-deterministic"
            " operation, or a random number without a seed"
        )
        known = replace(self.found, step=event.step, records=[*self.found.records, row])
        return said(known, NOT_REPEATABLE, event.name, why, str(kept.run_dir))


def told(one: Event | None, other: Event | None) -> tuple[Event, str, Unlike]:
    """The event, what is said of it, and its row."""
    event = one or other
    assert event is not None
    where = f" in microbatch {event.number}" if event.number else ""
    text = TEXTS[event.kind].format(name=event.name, where=where)
    shown = [a.shown if a else "nothing" for a in (one, other)]
    if shown[0] != shown[1]:
        text += f": {shown[0]} in the first run, {shown[1]} in the second"
    elif shown[0]:
        text += f" ({shown[0]})"
    digests = [a.digest if a else "nothing" for a in (one, other)]
    row = Unlike(
        f"{event.name}{where}, step {event.step}", *(shown if shown[0] != shown[1] else digests)
    )
    return event, text, row


def neither(found: Answer) -> Answer:
    why = (
        "neither run repeats its own records, and both are trained to the same bits: their job file, data or"
        " machine was changed since, or they depend on the number of processes"
    )
    return said(found, NEITHER, "both runs", why)
