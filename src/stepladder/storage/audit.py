"""Proves from a run's ledger that every sample was trained exactly once per epoch.

Follows the surviving line of attempts: each one's chain begins where the snapshot that it resumed
from ended, so its parent is the attempt whose chains give that hash. Steps that were rolled back
are `superseded`. Each surviving step's digest is recomputed from the plan. Memory: one epoch's
order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from stepladder.core import typed_file
from stepladder.core.errors import InputError, to_one_line
from stepladder.core.plan import Plan
from stepladder.storage.ledger_rank import Attempt, LedgerProblem, ProcessChange, Wrong
from stepladder.storage.ledger_reader import attempts_of, follow
from stepladder.storage.run_config import config_of
from stepladder.storage.rundir import CONFIG, LEDGER, MANIFEST, RESULT, SNAPSHOTS, snapshot_paths

BYTES_PER_ROW = 32  # while an order is made
MOST_EPOCHS = 1 << 21
MOST_TOLD = 100


@dataclass
class EpochCount:
    """Samples of one epoch. never_seen: of steps that the run has not reached."""

    epoch: int
    lost: int = 0
    repeated: int = 0
    never_seen: int = 0


@dataclass
class Audit:
    """What the ledger proves.

    history: changes of the ranks within attempts, oldest first.  problems: with file, step and
    rank."""

    epochs: list[EpochCount]
    superseded: int
    attempts: int
    history: list[ProcessChange]
    problems: list[str]

    @property
    def changes(self) -> int:
        return len(self.history)

    @property
    def lost(self) -> int:
        return sum(e.lost for e in self.epochs)

    @property
    def repeated(self) -> int:
        return sum(e.repeated for e in self.epochs)

    @property
    def ok(self) -> bool:
        return not self.problems and not self.lost and not self.repeated

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "epochs": [asdict(e) for e in self.epochs],
            "lost": self.lost,
            "repeated": self.repeated,
            "superseded": self.superseded,
            "attempts": self.attempts,
            "changes": self.changes,
            "history": [asdict(one) for one in self.history],
            "ok": self.ok,
            "problems": self.problems,
        }


@dataclass(frozen=True)
class Done:
    """What is read of a result.json."""

    steps: int


@dataclass(frozen=True)
class ManifestHead:
    """What is read of a snapshot's manifest. ledger: the hash over all ranks' chains at its step."""

    step: int
    ledger: str


@dataclass(frozen=True)
class Stretch:
    """Steps of one attempt, the first and the last included, that the final weights contain."""

    attempt: Attempt
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1


def audit(run_dir: Path) -> Audit:
    """Check the ledger of `run_dir`. Raises InputError where there is none."""
    with config_of(run_dir) as config:
        plan = Plan.from_json(config["plan"])
    problems: list[str] = []
    snapshots = snapshot_chains(run_dir)
    number, attempts = followed(run_dir, plan, snapshots, problems)
    line = surviving_line(attempts, problems)
    check_newest_snapshot(snapshots, line, problems)
    last = max(line[-1].last if line else 0, steps_of_result(run_dir, problems))
    epochs = compare_with_plan(run_dir, plan, line, last, problems)
    superseded = sum(a.end - a.start for a in attempts) - sum(map(len, line))
    return Audit(epochs, superseded, number, [one for a in attempts for one in a.changes], problems)


def followed(
    run_dir: Path, plan: Plan, snapshots: dict[int, str], problems: list[str]
) -> tuple[int, list[Attempt]]:
    """How often the ranks were started, and those attempts that trained, with every line verified."""
    refuse_too_many_rows(run_dir, plan)
    number, attempts = attempts_of(run_dir, problems)
    points = sorted({attempt.start for attempt in attempts}.union(snapshots))
    for attempt in attempts:
        try:
            follow(run_dir, attempt, plan, points)
        except LedgerProblem as error:
            problems.append(str(error))
    return number, attempts


def refuse_too_many_rows(run_dir: Path, plan: Plan) -> None:
    """Raises InputError where the order of an epoch does not fit into memory: config.json may be
    damaged.
    """
    rows = (
        plan.num_samples
        if plan.chunks is None
        else sum(-(-rows // per) for rows, per in plan.chunks.shards)
    )
    needed, free = rows * BYTES_PER_ROW, psutil.virtual_memory().available
    if needed > free:
        raise InputError(
            f"{run_dir / CONFIG} names {plan.num_samples} samples, whose order takes {needed >> 20} MiB of"
            f" memory; {free >> 20} MiB are free",
            "a machine with more memory, if that number is right",
        )


def surviving_line(attempts: list[Attempt], problems: list[str]) -> list[Stretch]:
    """What the final weights contain, oldest first."""
    line: list[Stretch] = []
    if not attempts:
        return line
    child, end = attempts[-1], attempts[-1].end
    while True:
        line.insert(0, Stretch(child, child.start + 1, end))
        if child.start == 0:
            if child.chain:
                problems.append(
                    f"attempt {child.number} starts at step 0 with a chain of something before"
                )
            return line
        earlier = [
            a
            for a in attempts
            if a.number < child.number and child.chain in a.chains.get(child.start, ())
        ]
        if not earlier:
            problems.append(
                f"attempt {child.number} resumed from step {child.start}, which no earlier attempt's ledger proves"
            )
            return line
        child, end = earlier[-1], child.start


def snapshot_chains(run_dir: Path) -> dict[int, str]:
    """What each snapshot says of the ledger at its step; those set aside say nothing any more."""
    found = {}
    for path in snapshot_paths(run_dir / SNAPSHOTS):
        with suppress(OSError, ValueError):  # a damaged snapshot proves nothing; `train` reports it
            manifest = typed_file.parse_json(typed_file.read_file(path / MANIFEST), ManifestHead)
            found[manifest.step] = manifest.ledger
    return found


def check_newest_snapshot(chains: dict[int, str], line: list[Stretch], problems: list[str]) -> None:
    """The newest snapshot's hash must be the ledger's: the ledger was on disk before it."""
    step = max(chains, default=0)
    if chains and not any(
        step <= s.last and chains[step] in s.attempt.chains.get(step, ()) for s in line
    ):
        problems.append(
            f"the ledger does not lead to the snapshot of step {step}: lines are missing at its end"
        )


def steps_of_result(run_dir: Path, problems: list[str]) -> int:
    """How far a finished run has come; 0 for one that is not finished."""
    try:
        return typed_file.parse_json(typed_file.read_file(run_dir / RESULT), Done).steps
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        problems.append(f"{RESULT} cannot be read ({to_one_line(error)})")
        return 0


def compare_with_plan(
    run_dir: Path, plan: Plan, line: list[Stretch], last: int, problems: list[str]
) -> list[EpochCount]:
    """Surviving steps that are not as planned, and those up to the `last` one that nobody recorded:
    all lost.
    """
    per_epoch = plan.steps_per_epoch
    if last > MOST_EPOCHS * per_epoch:
        raise InputError(
            f"{LEDGER}/ or {RESULT} of {run_dir} speaks of step {last}, in epoch {last // per_epoch}",
            f"the right {CONFIG} there: by it an epoch has {per_epoch} step(s)",
        )
    epochs = [EpochCount(e) for e in range(plan.epoch_of_step(max(last - 1, 0)) + 1)]
    for first, end in ((0, line[0].first - 1), (line[-1].last, last)) if line else ((0, last),):
        for epoch in epochs[first // per_epoch : -(-end // per_epoch)]:
            begin = epoch.epoch * per_epoch
            epoch.lost += samples(plan, max(first, begin), min(end, begin + per_epoch))
    epochs[-1].never_seen = samples(plan, last, len(epochs) * per_epoch)
    for stretch in line:
        wrong = [w for w in stretch.attempt.wrong if stretch.first <= w.step <= stretch.last]
        for one in wrong:
            epoch = epochs[plan.epoch_of_step(one.step - 1)]
            epoch.lost += one.planned
            epoch.repeated += max(0, one.count - one.planned)
        problems += told(stretch.attempt, sorted(wrong, key=lambda one: (one.step, one.rank)))
    return epochs


def samples(plan: Plan, first: int, end: int) -> int:
    """Of the steps [first, end) of one epoch, counted from 0."""
    return plan.batch(end - 1)[1] - plan.batch(first)[0] if first < end else 0


def told(attempt: Attempt, wrong: list[Wrong]) -> Iterator[str]:
    """A line for each, or for the first ones: of a run on other data it is all of them."""
    for one in wrong[:MOST_TOLD]:
        yield (
            f"attempt {attempt.number}: step {one.step}, rank {one.rank} trained other samples than planned"
            f" ({one.count} of {one.planned})"
        )
    if len(wrong) > MOST_TOLD:
        yield f"attempt {attempt.number}: {len(wrong) - MOST_TOLD} more such steps, up to step {wrong[-1].step}"
