"""Reading ledgers back: what each rank wrote, with every line's hash verified.

Many lines of one rank are read, then many of the next: no file stays open, and little is held in memory, whatever
the number of ranks and steps.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count as count_from
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stepladder.core.errors import InputError
from stepladder.core.jsonl import is_whole
from stepladder.core.plan import Plan
from stepladder.core.stored import opened
from stepladder.storage.ledger import LedgerHeader, attempt_file, digests, join, line_text, link, step_text
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
    """One start of the ranks. chains: hash over all ranks at the steps where others may resume."""

    number: int
    world_size: int
    start: int
    chain: str
    end: int = 0
    chains: dict[int, str] = field(default_factory=dict)
    wrong: list[Wrong] = field(default_factory=list)


class LedgerProblem(Exception):
    """A ledger file that is not what was written."""


@dataclass(frozen=True)
class Planned:
    """What the ranks should have trained in steps [first, first + n): counts and digests of shape (n, ranks)."""

    first: int
    epochs: NDArray[np.int64]
    counts: NDArray[np.int64]
    digests: NDArray[np.uint64]


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
    whole = [header for header in headers if header is not None]
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
    if is_whole(world_size) and world_size > 0 and is_whole(start) and isinstance(chain, str):
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
    most = min(reader.size for reader in readers) // LEAST_LINE
    while True:
        left = max(0, attempt.start + most - attempt.end) + 1
        last = min([attempt.end + min(at_once, left), *(point for point in points if point > attempt.end)])
        planned = planned_steps(plan, attempt.end, last, attempt.world_size)
        stops = [(reader.read(planned), reader.problem is None, reader.rank) for reader in readers]
        done, is_sound, rank = min(stops)
        attempt.end += done
        if attempt.end < last:
            if not is_sound:
                raise LedgerProblem(readers[rank].problem)
            return
        if last in points:
            attempt.chains[last] = join([reader.chain for reader in readers])


def steps_at_once(world_size: int, global_batch: int) -> int:
    """Of which the ranks' lines and the samples' order are held together."""
    return max(1, min(LINES_AT_ONCE // world_size, SAMPLES_AT_ONCE // global_batch))


class RankReader:
    """One rank's lines, some at a time. chain: at the last line read.  problem: with the line after it."""

    def __init__(self, run_dir: Path, attempt: Attempt, rank: int) -> None:
        self.path = attempt_file(run_dir, attempt.number, rank)
        self.attempt, self.rank, self.place = attempt, rank, place_of(attempt, rank)
        self.problem: str | None = None
        with self._opened() as file:
            text = file.readline(LONGEST_LINE)
            self.offset, self.size = len(text), os.fstat(file.fileno()).st_size
        header, body, self.chain = cut(text.decode(errors="replace"), "link", self.place, "header")
        expected = asdict(LedgerHeader(attempt.number, rank, attempt.world_size, attempt.start, attempt.chain))
        if {name: header.get(name) for name in expected} != expected:
            raise LedgerProblem(f"{self.place}: its header is another rank's or another attempt's")
        if link(attempt.chain, body + "}") != self.chain:
            raise LedgerProblem(f"{self.place}: header altered")

    def _opened(self) -> BinaryIO:
        try:
            return opened(self.path)
        except (OSError, ValueError) as error:
            raise LedgerProblem(f"{self.place}: {self.path.name} cannot be read") from error

    def read(self, planned: Planned) -> int:
        """How many of these steps the rank has done: up to the end, or to a problem."""
        done = 0
        counts, sums = planned.counts[:, self.rank].tolist(), planned.digests[:, self.rank].tolist()
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
        return done

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


# -- what it should be ----------------------------------------------------------------------------------------


def planned_steps(plan: Plan, first: int, last: int, world_size: int) -> Planned:
    """Of the steps [first, last), counted from 0. An epoch's order is made once for all that are in it."""
    sizes = [hi - lo for lo, hi in map(plan.batch, range(first, last))]
    cuts = {size: shares(plan, first + sizes.index(size), world_size) for size in set(sizes)}
    counts = np.array([cuts[size] for size in sizes])
    indices = np.concatenate(list(orders(plan, first, last)))
    epochs = np.arange(first, last) // plan.steps_per_epoch
    return Planned(first, epochs, counts, digests(indices, counts.ravel().tolist()).reshape(counts.shape))


def shares(plan: Plan, step: int, world_size: int) -> list[int]:
    """How many samples of the step each rank has."""
    return [sum(map(len, plan.share(step, rank, world_size))) for rank in range(world_size)]


def orders(plan: Plan, first: int, last: int) -> Iterator[NDArray[np.int64]]:
    """The data-set indices of these steps, one after the other."""
    while first < last:
        end = min(last, (first // plan.steps_per_epoch + 1) * plan.steps_per_epoch)
        if plan.stream is None:
            yield plan.order(plan.epoch_of_step(first))[plan.batch(first)[0] : plan.batch(end - 1)[1]]
        else:
            yield from (plan.stream.indices(plan.epoch_of_step(s), *plan.batch(s)) for s in range(first, end))
        first = end
