"""Proves from a run's ledger that every sample was trained exactly once per epoch.

Follows the surviving line of attempts: each one's chain begins where the snapshot that it resumed from
ended, so its parent is the attempt whose chains give that hash. Steps that were rolled back are
`superseded`. Each surviving step's digest is recomputed from the plan. Memory: one epoch's order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.plan import Plan
from stepladder.storage.ledger import attempt_file, digests, join, link
from stepladder.storage.rundir import LEDGER, RESULT, config_of


@dataclass
class Attempt:
    """One start of the ranks. chains: hash over all ranks at the steps where others may resume."""

    number: int
    world_size: int
    start: int
    chain: str
    end: int = 0
    chains: dict[int, str] = field(default_factory=dict)


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


class LedgerProblem(Exception):
    """A ledger file that is not what was written."""


def audit(run_dir: Path) -> Audit:
    """Check the ledger of `run_dir`. Raises InputError where there is none."""
    with config_of(run_dir) as stored:
        plan = Plan.from_json(stored["plan"])
    numbers = attempt_numbers(run_dir)
    problems: list[str] = []
    attempts = [a for number in numbers if (a := read_attempt(run_dir, number, problems))]
    resume_points = {a.start for a in attempts} | snapshot_chains(run_dir).keys()
    for attempt in attempts:
        try:
            for step, lines, chains in walk(run_dir, attempt):
                attempt.end = step
                if step in resume_points:
                    attempt.chains[step] = join(chains)
                del lines
        except LedgerProblem as error:
            problems.append(str(error))
    line = surviving_line(attempts, problems)
    check_newest_snapshot(run_dir, line, problems)
    epochs, superseded = compare_with_plan(run_dir, plan, attempts, line, problems)
    return Audit(epochs, superseded, len(numbers), problems)


def attempt_numbers(run_dir: Path) -> list[int]:
    numbers = sorted({int(path.name[8:12]) for path in (run_dir / LEDGER).glob("attempt-[0-9]*.rank-*.jsonl")})
    if not numbers:
        raise InputError(f"{run_dir} has no ledger of its steps", f"ls {run_dir / LEDGER}")
    return numbers


def read_attempt(run_dir: Path, number: int, problems: list[str]) -> Attempt | None:
    """The attempt as the first readable header says; None if it was killed before it trained a step.

    Before the first step is done every rank has written its header, so without steps, headers may be missing.
    """
    headers, trained = [], False
    for path in sorted((run_dir / LEDGER).glob(f"attempt-{number:04d}.rank-*.jsonl")):
        with path.open(errors="replace") as file:
            headers.append(read_header(file.readline(), number))
            trained = trained or bool(file.readline())
    whole = [header for header in headers if header is not None]
    if not whole:
        if trained:
            problems.append(f"attempt {number}: no rank's header can be read")
        return None
    if not trained and len(whole) < whole[0].world_size:
        return None
    return whole[0]


def read_header(text: str, number: int) -> Attempt | None:
    """The attempt of a header line; None for a torn or senseless one."""
    try:
        header = json.loads(text)
        world_size, start = int(header["world_size"]), int(header["resumed_from_step"])
        return Attempt(number, world_size, start, header["chain"], start) if world_size > 0 else None
    except (ValueError, KeyError, TypeError):
        return None


def walk(run_dir: Path, attempt: Attempt) -> Iterator[tuple[int, list[dict[str, Any]], list[str]]]:
    """Per step that all ranks finished: its number, each rank's line, each rank's chain up to it.

    Raises LedgerProblem at the first line that was altered, deleted or moved. A torn last line, as a
    kill leaves it, ends the walk.
    """
    readers = [read_rank(run_dir, attempt, rank) for rank in range(attempt.world_size)]
    step = attempt.start
    while True:
        lines = [next(reader, None) for reader in readers]
        if any(line is None for line in lines):
            return
        step += 1
        whole = [line for line in lines if line is not None]
        for rank, line in enumerate(whole):
            if line["step"] != step:
                raise LedgerProblem(f"attempt {attempt.number} rank {rank}: step {step} is missing")
        yield step, whole, [line["chain"] for line in whole]


def read_rank(run_dir: Path, attempt: Attempt, rank: int) -> Iterator[dict[str, Any]]:
    """One rank's lines with their chain verified."""
    path = attempt_file(run_dir, attempt.number, rank)
    place = f"attempt {attempt.number} rank {rank}"
    if not path.exists():
        raise LedgerProblem(f"{place}: {path.name} is missing")
    with path.open(errors="replace") as file:
        header, body, chain = cut(file.readline(), "link", place, "header")
        names = ("attempt", "rank", "world_size", "resumed_from_step", "chain")
        expected = [attempt.number, rank, attempt.world_size, attempt.start, attempt.chain]
        if [header.get(name) for name in names] != expected:
            raise LedgerProblem(f"{place}: its header is another rank's or another attempt's")
        if link(attempt.chain, body + "}") != chain:
            raise LedgerProblem(f"{place}: header altered")
        step = attempt.start
        for text in file:
            if not text.endswith("\n"):
                return
            line, body, stored = cut(text, "chain", place, f"line after step {step}")
            step = line.get("step", step + 1)
            chain = link(chain, body)
            if chain != stored:
                raise LedgerProblem(
                    f"{place}: the line of step {step} was altered or moved, or one before it was deleted"
                )
            yield line


def cut(text: str, name: str, place: str, what: str) -> tuple[dict[str, Any], str, str]:
    """A line, its text up to the hash called `name`, and that hash, which must be all that follows."""
    try:
        line = json.loads(text)
        body, hashed = text[: text.rindex(f', "{name}"')], line[name]
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerProblem(f"{place}: unreadable {what}") from error
    if text != f'{body}, "{name}": "{hashed}"}}\n':
        raise LedgerProblem(f"{place}: {what} was written on after its hash")
    return line, body, hashed


def surviving_line(attempts: list[Attempt], problems: list[str]) -> list[tuple[Attempt, int, int]]:
    """(attempt, first step, last step) whose steps the final weights contain, oldest first."""
    line: list[tuple[Attempt, int, int]] = []
    if not attempts:
        return line
    child, end = attempts[-1], attempts[-1].end
    while True:
        line.insert(0, (child, child.start + 1, end))
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
    for path in (run_dir / "snapshots").glob("step_*/manifest.json"):
        if path.parent.suffix:
            continue
        try:
            manifest = json.loads(path.read_text())
            found[manifest["step"]] = manifest["ledger"]
        except (OSError, ValueError, KeyError):
            continue  # a damaged snapshot proves nothing; `train` reports it
    return found


def check_newest_snapshot(run_dir: Path, line: list[tuple[Attempt, int, int]], problems: list[str]) -> None:
    """The newest snapshot's hash must be the ledger's: the ledger was on disk before it."""
    chains = snapshot_chains(run_dir)
    if not chains:
        return
    step = max(chains)
    if not any(step <= end and attempt.chains.get(step) == chains[step] for attempt, _, end in line):
        problems.append(f"the ledger does not lead to the snapshot of step {step}: lines are missing at its end")


def compare_with_plan(
    run_dir: Path, plan: Plan, attempts: list[Attempt], line: list[tuple[Attempt, int, int]], problems: list[str]
) -> tuple[list[EpochCount], int]:
    """Each surviving step against the plan, and how many others there are. Steps that nobody recorded are lost."""
    last = line[-1][2] if line else 0
    try:
        last = max(last, json.loads((run_dir / RESULT).read_text())["steps"])
    except FileNotFoundError:
        pass  # not finished yet
    except (ValueError, KeyError, TypeError) as error:
        problems.append(f"{RESULT} cannot be read ({type(error).__name__})")
    epochs = [EpochCount(e) for e in range(plan.epoch_of_step(max(last - 1, 0)) + 1)]
    seen = line[0][1] - 1 if line else 0
    lost_before(plan, epochs, 0, seen)
    for attempt, first, end in line:
        try:
            for step, lines, _ in walk(run_dir, attempt):
                if first <= step <= end:
                    compare_step(plan, attempt, step, lines, epochs[plan.epoch_of_step(step - 1)], problems)
                    seen = step
        except LedgerProblem:
            pass  # reported already; what it hides counts as lost
        lost_before(plan, epochs, seen, end)
        seen = end
    lost_before(plan, epochs, seen, last)
    rest = range(last, len(epochs) * plan.steps_per_epoch)
    epochs[-1].never_seen = sum(hi - lo for lo, hi in map(plan.batch, rest))
    survived = {attempt.number: end - first + 1 for attempt, first, end in line}
    superseded = sum(a.end - a.start - survived.get(a.number, 0) for a in attempts)
    return epochs, superseded


def lost_before(plan: Plan, epochs: list[EpochCount], seen: int, end: int) -> None:
    """Steps after `seen` up to `end` have no proof."""
    for step in range(seen, end):
        lo, hi = plan.batch(step)
        epochs[plan.epoch_of_step(step)].lost += hi - lo


def compare_step(
    plan: Plan, attempt: Attempt, step: int, lines: list[dict[str, Any]], epoch: EpochCount, problems: list[str]
) -> None:
    """One step's digests, rank by rank. `step` counts from 1, as in the files."""
    for rank, line in enumerate(lines):
        spans = plan.share(step - 1, rank, attempt.world_size)
        planned = [plan.indices(step - 1, span) for span in spans]
        indices = np.concatenate(planned) if planned else np.empty(0, np.int64)
        digest = int(digests(indices, [len(indices)])[0])
        if (line["count"], line["digest"]) != (len(indices), f"{digest:016x}"):
            problems.append(
                f"attempt {attempt.number}: step {step}, rank {rank} trained other samples than planned"
                f" ({line['count']} of {len(indices)})"
            )
            epoch.lost += len(indices)
            epoch.repeated += max(0, line["count"] - len(indices))
