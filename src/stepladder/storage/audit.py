"""Proves from a run's ledger that every sample was trained exactly once per epoch.

Follows the surviving line of attempts: each one's chain begins where the snapshot that it resumed from
ended, so its parent is the attempt whose chains give that hash. Steps that were rolled back are
`superseded`. Each surviving step's digest is recomputed from the plan. Memory: one epoch's order.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.plan import Plan
from stepladder.storage.ledger import digests, join
from stepladder.storage.ledger_reader import Attempt, LedgerProblem, Line, attempt_numbers, read_attempt, walk
from stepladder.storage.run_config import config_of
from stepladder.storage.rundir import MANIFEST, RESULT, SNAPSHOTS, snapshot_paths


@dataclass
class EpochCount:
    """Samples of one epoch. never_seen: of steps that the run has not reached."""

    epoch: int
    lost: int = 0
    repeated: int = 0
    never_seen: int = 0


@dataclass
class Audit:
    """What the ledger proves. problems: each with its file, step and rank."""

    epochs: list[EpochCount]
    superseded: int
    attempts: int
    problems: list[str]

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
            "schema": 1, "epochs": [asdict(e) for e in self.epochs], "lost": self.lost, "repeated": self.repeated,
            "superseded": self.superseded, "attempts": self.attempts, "ok": self.ok, "problems": self.problems,
        }  # fmt: skip


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
    with config_of(run_dir) as stored:
        plan = Plan.from_json(stored["plan"])
    numbers = attempt_numbers(run_dir)
    problems: list[str] = []
    attempts = [a for number in numbers if (a := read_attempt(run_dir, number, problems))]
    snapshots = snapshot_chains(run_dir)
    follow_chains(run_dir, attempts, snapshots.keys(), problems)
    line = surviving_line(attempts, problems)
    check_newest_snapshot(snapshots, line, problems)
    last = max(line[-1].last if line else 0, steps_of_result(run_dir, problems))
    epochs = compare_with_plan(run_dir, plan, line, last, problems)
    superseded = sum(a.end - a.start for a in attempts) - sum(map(len, line))
    return Audit(epochs, superseded, len(numbers), problems)


def follow_chains(run_dir: Path, attempts: list[Attempt], saved: Collection[int], problems: list[str]) -> None:
    """Verify every line; note each attempt's end, and its chain where another could go on from it."""
    resume_points = {a.start for a in attempts}.union(saved)
    for attempt in attempts:
        try:
            for step, lines in walk(run_dir, attempt):
                attempt.end = step
                if step in resume_points:
                    attempt.chains[step] = join([line["chain"] for line in lines])
        except LedgerProblem as error:
            problems.append(str(error))


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
                problems.append(f"attempt {child.number} starts at step 0 with a chain of something before")
            return line
        earlier = [a for a in attempts if a.number < child.number and a.chains.get(child.start) == child.chain]
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
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            found[manifest["step"]] = manifest["ledger"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a damaged snapshot proves nothing; `train` reports it
    return found


def check_newest_snapshot(chains: dict[int, str], line: list[Stretch], problems: list[str]) -> None:
    """The newest snapshot's hash must be the ledger's: the ledger was on disk before it."""
    step = max(chains, default=0)
    if chains and not any(step <= s.last and s.attempt.chains.get(step) == chains[step] for s in line):
        problems.append(f"the ledger does not lead to the snapshot of step {step}: lines are missing at its end")


def steps_of_result(run_dir: Path, problems: list[str]) -> int:
    """How far a finished run has come; 0 for one that is not finished."""
    try:
        return int(json.loads((run_dir / RESULT).read_text())["steps"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        problems.append(f"{RESULT} cannot be read ({type(error).__name__})")
        return 0


def compare_with_plan(
    run_dir: Path, plan: Plan, line: list[Stretch], last: int, problems: list[str]
) -> list[EpochCount]:
    """Each surviving step against the plan, up to the `last` one. Steps that nobody recorded are lost."""
    epochs = [EpochCount(e) for e in range(plan.epoch_of_step(max(last - 1, 0)) + 1)]

    def lose(steps: range) -> None:
        for step in steps:
            lo, hi = plan.batch(step)
            epochs[plan.epoch_of_step(step)].lost += hi - lo

    seen = line[0].first - 1 if line else 0
    lose(range(seen))
    for stretch in line:
        with suppress(LedgerProblem):  # reported already; what it hides counts as lost
            for step, lines in walk(run_dir, stretch.attempt):
                if stretch.first <= step <= stretch.last:
                    epoch = epochs[plan.epoch_of_step(step - 1)]
                    problems += compare_step(plan, stretch.attempt, lines, epoch)
                    seen = step
        lose(range(seen, stretch.last))
        seen = stretch.last
    lose(range(seen, last))
    rest = range(last, len(epochs) * plan.steps_per_epoch)
    epochs[-1].never_seen = sum(hi - lo for lo, hi in map(plan.batch, rest))
    return epochs


def compare_step(plan: Plan, attempt: Attempt, lines: list[Line], epoch: EpochCount) -> Iterator[str]:
    """One step's digests, rank by rank: what is wrong with them, counted in `epoch` too."""
    for rank, line in enumerate(lines):
        step = line["step"] - 1  # lines count from 1
        planned = [plan.indices(step, span) for span in plan.share(step, rank, attempt.world_size)]
        indices = np.concatenate(planned) if planned else np.empty(0, np.int64)
        digest = int(digests(indices, [len(indices)])[0])
        if (line["count"], line["digest"]) != (len(indices), f"{digest:016x}"):
            epoch.lost += len(indices)
            epoch.repeated += max(0, line["count"] - len(indices))
            yield (
                f"attempt {attempt.number}: step {step + 1}, rank {rank} trained other samples than planned"
                f" ({line['count']} of {len(indices)})"
            )
