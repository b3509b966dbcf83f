"""Reading ledgers back: what each rank wrote, with every line's hash verified."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from stepladder.core.errors import InputError
from stepladder.storage.ledger import LedgerHeader, attempt_file, link
from stepladder.storage.rundir import LEDGER, attempts_in_ledger


class Line(TypedDict):
    """One step of one rank, as `Ledger.flush` writes it."""

    step: int
    epoch: int
    count: int
    digest: str
    chain: str


@dataclass
class Attempt:
    """One start of the ranks. chains: hash over all ranks at the steps where others may resume."""

    number: int
    world_size: int
    start: int
    chain: str
    end: int = 0
    chains: dict[int, str] = field(default_factory=dict)


class LedgerProblem(Exception):
    """A ledger file that is not what was written."""


def attempt_numbers(run_dir: Path) -> list[int]:
    numbers = sorted(attempts_in_ledger(run_dir))
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


def walk(run_dir: Path, attempt: Attempt) -> Iterator[tuple[int, list[Line]]]:
    """Per step that all ranks finished: its number, and each rank's line.

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
        yield step, whole


def read_rank(run_dir: Path, attempt: Attempt, rank: int) -> Iterator[Line]:
    """One rank's lines with their chain verified."""
    path = attempt_file(run_dir, attempt.number, rank)
    place = f"attempt {attempt.number} rank {rank}"
    if not path.exists():
        raise LedgerProblem(f"{place}: {path.name} is missing")
    with path.open(errors="replace") as file:
        header, body, chain = cut(file.readline(), "link", place, "header")
        expected = asdict(LedgerHeader(attempt.number, rank, attempt.world_size, attempt.start, attempt.chain))
        if {name: header.get(name) for name in expected} != expected:
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


def cut(text: str, name: str, place: str, what: str) -> tuple[Any, str, str]:
    """A line, its text up to the hash called `name`, and that hash, which must be all that follows."""
    try:
        line = json.loads(text)
        body, hashed = text[: text.rindex(f', "{name}"')], line[name]
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerProblem(f"{place}: unreadable {what}") from error
    if text != f'{body}, "{name}": "{hashed}"}}\n':
        raise LedgerProblem(f"{place}: {what} was written on after its hash")
    return line, body, hashed
