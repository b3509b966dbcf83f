"""One rank's lines of one attempt, each with its hash verified."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from itertools import count as count_from
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from stepladder.core.console import make_printable
from stepladder.core.errors import to_one_line
from stepladder.core.jsonl import is_count
from stepladder.core.typed_file import open_to_read
from stepladder.storage.ledger import LedgerHeader, attempt_file, line_text, link, step_text
from stepladder.storage.ledger_plan import Planned

LONGEST_LINE = 1 << 12  # bytes; ours have 150
DIGEST = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class Wrong:
    """A step that a rank says to have trained with `count` samples, which are not the `planned`
    ones.

    off: its digest less the planned one, modulo 2**64; over all ranks the sum is 0 where they only
    changed places."""

    step: int
    rank: int
    count: int
    planned: int
    off: int = 0


@dataclass(frozen=True)
class ProcessChange:
    """After `step` of an attempt, ranks were lost or joined while the others went on, by their
    numbers.

    why: what became of those that were lost, where their launchers knew it.
    """

    attempt: int
    step: int
    lost: list[int]
    joined: list[int]
    why: list[str]

    @property
    def sentence(self) -> str:
        gone = [
            f"{ranks_text(self.lost)} lost" + f" ({'; '.join(self.why)})" * bool(self.why)
        ] * bool(self.lost)
        come = [f"{ranks_text(self.joined)} joined"] * bool(self.joined)
        return f"after step {self.step}: {', '.join([*gone, *come]) or 'the ranks met again'}"


@dataclass
class Attempt:
    """One start of the ranks. chains: hashes over all ranks at the steps where others may resume:
    two where ranks were lost there. changes: of its ranks, oldest first.  in_rounds: as a
    LedgerHeader has it."""

    number: int
    world_size: int
    start: int
    chain: str
    end: int = 0
    chains: dict[int, set[str]] = field(default_factory=dict)
    changes: list[ProcessChange] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    in_rounds: bool = False


class LedgerProblem(Exception):
    """A ledger file that is not what was written."""


@dataclass(frozen=True)
class Change:
    """After `step` other ranks than before go on, in this order. group: numbers these changes, from
    1.

    why: as of a ProcessChange.
    """

    step: int
    ranks: tuple[int, ...]
    group: int
    why: tuple[str, ...] = ()


class RankReader:
    """One rank's lines, some at a time. chain: at the last line read.  problem: with the line after
    it.

    change: what the next line says of other ranks; nothing after it is read before `skip_to`.
    """

    def __init__(
        self, run_dir: Path, attempt: Attempt, rank: int, header: LedgerHeader | None = None
    ) -> None:
        self.path = attempt_file(run_dir, attempt.number, rank)
        self.attempt, self.rank, self.place = attempt, rank, place_of(attempt, rank)
        self.problem: str | None = None
        self.change: Change | None = None
        with self._opened() as file:
            text = file.readline(LONGEST_LINE)
            self.offset, self.size = len(text), os.fstat(file.fileno()).st_size
        found, body, self.chain = cut(text.decode(errors="replace"), "link", self.place, "header")
        start = attempt.world_size, attempt.start, attempt.chain, attempt.in_rounds
        header = header or LedgerHeader(attempt.number, rank, *start)
        expected = asdict(header)
        found = {"in_rounds": False, **found}
        if {name: found.get(name) for name in expected} != expected:
            raise LedgerProblem(f"{self.place}: its header is another rank's or another attempt's")
        if link(header.chain, body + "}") != self.chain:
            raise LedgerProblem(f"{self.place}: header altered")

    @property
    def early_change(self) -> Change | None:
        """The first one, if before the first step: a rank has one line at most of a step that is
        not done.
        """
        found = next((change for line in self._first_lines if (change := self._change(line))), None)
        return found if found and found.step == self.attempt.start else None

    @property
    def came_further(self) -> bool:
        """Whether it has begun with a second step, so that the first was done by all."""
        return len(self._first_lines) > 1

    @property
    def _first_lines(self) -> list[str]:
        with self._opened() as file:
            return list(
                islice(iter(lambda: file.readline(LONGEST_LINE).decode(errors="replace"), ""), 1, 4)
            )

    def _opened(self) -> BinaryIO:
        try:
            return open_to_read(self.path)
        except (OSError, ValueError) as error:
            raise LedgerProblem(f"{self.place}: {self.path.name} cannot be read") from error

    def read(self, planned: Planned, place: int) -> int:
        """How many of these steps the rank has done: up to the end, to a problem, or to a change.

        place: of the rank among those that do them.  Negative where a step before them was not done
        after all."""
        done = 0
        counts, sums = planned.counts[:, place].tolist(), planned.digests[:, place].tolist()
        asked = zip(
            count_from(planned.first + 1), planned.epochs.tolist(), counts, sums, strict=False
        )
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
                    raise LedgerProblem(
                        f"{self.place}: a line before step {change.step + 1} was altered"
                    )
                self.chain, found = stored, self._change(text)
                self.offset += len(raw)
                if found and found.group >= change.group:
                    break
        self.change = None

    def _change(self, text: str) -> Change | None:
        """What a line says of other ranks; None for another line. Its hash is looked at when it is
        skipped.
        """
        try:
            line = json.loads(text)
            step, ranks, group = line["step"], line["ranks"], line["group"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        are_whole = isinstance(ranks, list) and all(map(is_count, [step, group, *ranks]))
        if not are_whole:
            return None
        why = line.get("why")
        texts = [one for one in why if isinstance(one, str)] if isinstance(why, list) else []
        return Change(
            step, tuple(ranks), group, tuple(map(to_one_line, map(make_printable, texts)))
        )

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
        if not is_count(line.get("count")):
            raise LedgerProblem(f"{self.place}: the line of step {step} names no number of samples")
        if {name: line.get(name) for name in planned} != planned:
            off = (read_digest(line.get("digest")) - read_digest(planned["digest"])) % (1 << 64)
            self.attempt.wrong.append(Wrong(step, self.rank, line["count"], planned["count"], off))
        return stored


def has_no_header(path: Path) -> bool:
    """Whether its rank was lost before it had written that line."""
    try:
        with open_to_read(path) as file:
            text = file.readline(LONGEST_LINE)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return len(text) < LONGEST_LINE and not text.endswith(b"\n")


def ranks_text(ranks: list[int]) -> str:
    """Return ranks as a person would name them."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


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
