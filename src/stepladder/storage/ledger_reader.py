"""Reading ledgers back: what each rank wrote, with every line's hash verified.

Many lines of one rank are read, then many of the next: no file stays open, and little is held in memory, whatever
the number of ranks and steps.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from itertools import count as count_from
from pathlib import Path
from typing import Any, BinaryIO

from stepladder.core.errors import InputError
from stepladder.core.jsonl import is_whole
from stepladder.core.plan import Plan
from stepladder.core.stored import opened
from stepladder.storage.ledger import LedgerHeader, attempt_file, join, line_text, link, step_text
from stepladder.storage.ledger_plan import Planned, planned_steps
from stepladder.storage.rundir import LEDGER, ledgers

LINES_AT_ONCE, SAMPLES_AT_ONCE = 1 << 17, 1 << 20  # of all ranks
LONGEST_LINE = 1 << 12  # bytes; ours have 150
DIGEST = re.compile("[0-9a-f]{16}")
LEAST_LINE = len(line_text(step_text(0, 0, 0, 0), link("", "")))


@dataclass(frozen=True)
class Wrong:
    """A step that a rank says to have trained with `count` samples, which are not the `planned` ones.

    off: its digest less the planned one, modulo 2**64; over all ranks the sum is 0 where they only changed places.
    """

    step: int
    rank: int
    count: int
    planned: int
    off: int = 0


@dataclass
class Attempt:
    """One start of the ranks. chains: hashes over all ranks at the steps where others may resume: two where ranks
    were lost there. changes: how often they were.
    """

    number: int
    world_size: int
    start: int
    chain: str
    end: int = 0
    chains: dict[int, set[str]] = field(default_factory=dict)
    changes: int = 0
    wrong: list[Wrong] = field(default_factory=list)


class LedgerProblem(Exception):
    """A ledger file that is not what was written."""


def attempts_of(run_dir: Path, problems: list[str]) -> tuple[int, list[Attempt]]:
    """How often the ranks were started, and those attempts that trained. Raises InputError where there is none."""
    ranks: dict[int, list[int]] = {}
    for number, rank in sorted(ledgers(run_dir)):
        ranks.setdefault(number, []).append(rank)
    if not ranks:
        raise InputError(f"{run_dir} has no ledger of its steps", f"ls {run_dir / LEDGER}")
    found = [read_attempt(run_dir, number, ranks[number], problems) for number in ranks]
    return len(ranks), [attempt for attempt in found if attempt is not None]


def read_attempt(run_dir: Path, number: int, ranks: list[int], problems: list[str]) -> Attempt | None:
    """The attempt as the first readable header says; None if it was killed before it trained a step.

    Before the first step is done every rank has written its header, so without steps, headers may be missing.
    """
    headers, trained = [], False
    for rank in ranks:
        try:
            with opened(attempt_file(run_dir, number, rank)) as file:
                headers.append(read_header(file.readline(LONGEST_LINE), number))
                trained = trained or bool(file.read(1))
        except (OSError, ValueError):  # `follow` says it
            trained = True
    whole = [header for header in headers if header is not None and header.world_size]
    if not whole:
        if trained:
            problems.append(f"attempt {number}: no rank's header can be read")
        return None
    if not trained and len(whole) < whole[0].world_size:
        return None
    return whole[0]


def read_header(text: bytes, number: int) -> Attempt | None:
    """The attempt of a header line; None for a torn or senseless one."""
    try:
        header = json.loads(text)
        world_size, start, chain = header["world_size"], header["resumed_from_step"], header["chain"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if is_whole(world_size) and world_size >= 0 and is_whole(start) and isinstance(chain, str):
        return Attempt(number, world_size, start, chain, start)
    return None


def follow(run_dir: Path, attempt: Attempt, plan: Plan, points: list[int]) -> None:
    """Verify every line of an attempt: note its end, its chain at `points`, and what is not as planned.

    A torn last line, as a kill leaves it, is a step not done. Raises LedgerProblem at the first line that was
    altered, deleted or moved.
    """
    for rank in range(attempt.world_size):  # which may be said to be any number
        path = attempt_file(run_dir, attempt.number, rank)
        if not path.exists():
            raise LedgerProblem(f"{place_of(attempt, rank)}: {path.name} is missing")
    readers = [RankReader(run_dir, attempt, rank) for rank in range(attempt.world_size)]
    at_once = steps_at_once(attempt.world_size, plan.global_batch)
    while True:
        left = min(reader.size - reader.offset for reader in readers) // LEAST_LINE + 1
        last = min([attempt.end + min(at_once, left), *(point for point in points if point > attempt.end)])
        planned = planned_steps(plan, attempt.end, last, len(readers))
        stops = [
            (reader.read(planned, place), reader.problem is None, place) for place, reader in enumerate(readers)
        ]
        done, is_sound, place = min(stops)
        attempt.end += done
        changes = [reader.change for reader in readers if reader.change]
        change = max(changes, key=lambda one: one.group, default=None)
        if attempt.end < last:
            if not is_sound:
                raise LedgerProblem(readers[place].problem)
            if change is None:
                return
            if attempt.end < change.step:
                raise LedgerProblem(f"{readers[place].place}: step {attempt.end + 1} is missing")
            attempt.end = change.step
            readers = left_after(change, readers, attempt, run_dir)
        if attempt.end in points:
            attempt.chains.setdefault(attempt.end, set()).add(join([reader.chain for reader in readers]))


def left_after(change: Change, readers: list[RankReader], attempt: Attempt, run_dir: Path) -> list[RankReader]:
    """The readers of the ranks that went on, or joined, then; what was tried after its step is void."""
    by_rank = {reader.rank: reader for reader in readers}
    for rank in set(change.ranks) - by_rank.keys():
        by_rank[rank] = RankReader(run_dir, attempt, rank, LedgerHeader(attempt.number, rank, 0, 0, ""))
    attempt.changes += 1
    attempt.wrong = [one for one in attempt.wrong if one.step <= change.step]
    attempt.chains = {step: chains for step, chains in attempt.chains.items() if step <= change.step}
    left = [by_rank[rank] for rank in change.ranks]
    for reader in left:
        reader.skip_to(change)
    return left


def steps_at_once(world_size: int, global_batch: int) -> int:
    """Of which the ranks' lines and the samples' order are held together."""
    return max(1, min(LINES_AT_ONCE // world_size, SAMPLES_AT_ONCE // global_batch))


@dataclass(frozen=True)
class Change:
    """After `step` other ranks than before go on, in this order. group: numbers these changes, from 1."""

    step: int
    ranks: tuple[int, ...]
    group: int


class RankReader:
    """One rank's lines, some at a time. chain: at the last line read.  problem: with the line after it.

    change: what the next line says of other ranks; nothing after it is read before `skip_to`.
    """

    def __init__(self, run_dir: Path, attempt: Attempt, rank: int, header: LedgerHeader | None = None) -> None:
        self.path = attempt_file(run_dir, attempt.number, rank)
        self.attempt, self.rank, self.place = attempt, rank, place_of(attempt, rank)
        self.problem: str | None = None
        self.change: Change | None = None
        with self._opened() as file:
            text = file.readline(LONGEST_LINE)
            self.offset, self.size = len(text), os.fstat(file.fileno()).st_size
        found, body, self.chain = cut(text.decode(errors="replace"), "link", self.place, "header")
        header = header or LedgerHeader(attempt.number, rank, attempt.world_size, attempt.start, attempt.chain)
        expected = asdict(header)
        if {name: found.get(name) for name in expected} != expected:
            raise LedgerProblem(f"{self.place}: its header is another rank's or another attempt's")
        if link(header.chain, body + "}") != self.chain:
            raise LedgerProblem(f"{self.place}: header altered")

    def _opened(self) -> BinaryIO:
        try:
            return opened(self.path)
        except (OSError, ValueError) as error:
            raise LedgerProblem(f"{self.place}: {self.path.name} cannot be read") from error

    def read(self, planned: Planned, place: int) -> int:
        """How many of these steps the rank has done: up to the end, to a problem, or to a change.

        place: of the rank among those that do them.  Negative where a step before them was not done after all.
        """
        done = 0
        counts, sums = planned.counts[:, place].tolist(), planned.digests[:, place].tolist()
        asked = zip(count_from(planned.first + 1), planned.epochs.tolist(), counts, sums, strict=False)
        with self._opened() as file:
            file.seek(self.offset)
            texts = iter(lambda: file.readline(LONGEST_LINE), b"")
            for (step, epoch, count, digest), raw in zip(asked, texts, strict=False):
                body, text = step_text(step, epoch, count, digest), raw.decode(errors="replace")
                chain = link(self.chain, body)
                if text != line_text(body, chain):
                    if not text.endswith("\n") and len(raw) < LONGEST_LINE:
                        break
                    if self._change(text):
                        break
                    try:
                        chain = self._other(
                            text, step, {"epoch": epoch, "count": count, "digest": f"{digest:016x}"}
                        )
                    except LedgerProblem as error:
                        self.problem = str(error)
                        break
                self.chain = chain
                self.offset += len(raw)
                done += 1
            file.seek(self.offset)
            self.change = self._change(file.readline(LONGEST_LINE).decode(errors="replace"))
        return done if self.change is None else min(done, self.change.step - planned.first)

    def skip_to(self, change: Change) -> None:
        """Past the line of this change, or to the end, where the rank was lost before it wrote it."""
        with self._opened() as file:
            file.seek(self.offset)
            for raw in iter(lambda: file.readline(LONGEST_LINE), b""):
                text = raw.decode(errors="replace")
                if not text.endswith("\n") and len(raw) < LONGEST_LINE:
                    break
                _, body, stored = cut(text, "chain", self.place, "line")
                if link(self.chain, body) != stored:
                    raise LedgerProblem(f"{self.place}: a line before step {change.step + 1} was altered")
                self.chain, found = stored, self._change(text)
                self.offset += len(raw)
                if found and found.group >= change.group:
                    break
        self.change = None

    def _change(self, text: str) -> Change | None:
        """What a line says of other ranks; None for another line. Its hash is looked at when it is skipped."""
        try:
            line = json.loads(text)
            step, ranks, group = line["step"], line["ranks"], line["group"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        are_whole = isinstance(ranks, list) and all(map(is_whole, [step, group, *ranks]))
        return Change(step, tuple(ranks), group) if are_whole else None

    def _other(self, text: str, step: int, planned: dict[str, Any]) -> str:
        """A line that is not the planned one: its chain, if it is what the rank wrote."""
        line, body, stored = cut(text, "chain", self.place, f"line after step {step - 1}")
        said = line.get("step", step)
        if link(self.chain, body) != stored:
            raise LedgerProblem(
                f"{self.place}: the line of step {said} was altered or moved, or one before it was deleted"
            )
        if said != step:
            raise LedgerProblem(f"{self.place}: step {step} is missing")
        if not is_whole(line.get("count")):
            raise LedgerProblem(f"{self.place}: the line of step {step} names no number of samples")
        if {name: line.get(name) for name in planned} != planned:
            off = (read_digest(line.get("digest")) - read_digest(planned["digest"])) % (1 << 64)
            self.attempt.wrong.append(Wrong(step, self.rank, line["count"], planned["count"], off))
        return stored


def read_digest(text: Any) -> int:
    """Of a line that its rank wrote; 0 for what is none."""
    return int(text, 16) if isinstance(text, str) and DIGEST.fullmatch(text) else 0


def place_of(attempt: Attempt, rank: int) -> str:
    return f"attempt {attempt.number} rank {rank}"


def cut(text: str, name: str, place: str, what: str) -> tuple[Any, str, str]:
    """A line, its text up to the hash called `name`, and that hash, which must be all that follows."""
    try:
        line = json.loads(text)
        body, hashed = text[: text.rindex(f', "{name}"')], line[name]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerProblem(f"{place}: unreadable {what}") from error
    if text != f'{body}, "{name}": "{hashed}"}}\n':
        raise LedgerProblem(f"{place}: {what} was appended to after its hash")
    return line, body, hashed
