"""Reading one rank's ledger of one attempt, with the hash of every line verified."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count as count_from
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from stepladder.core.console import make_printable
from stepladder.core.errors import to_one_line
from stepladder.core.jsonl import is_count
from stepladder.core.numbers import format_ranks
from stepladder.core.typed_file import open_to_read
from stepladder.storage.ledger import (
    LedgerHeader,
    extend_chain,
    format_line,
    format_step,
    ledger_path,
)
from stepladder.storage.ledger_plan import PlannedSteps

MAX_LEDGER_LINE_BYTES = 1 << 20  # of a step 150 bytes; of a change all ranks that continue
HEX_DIGEST = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class SampleMismatch:
    """A step for which a rank recorded other samples than planned.

    Args:
        step: The step, counted from 1.
        rank: The rank.
        count: The number of samples that it recorded.
        planned: The number of samples that were planned.
        digest_difference: The recorded digest minus the planned one, modulo 2**64. The sum over
            all ranks is 0 if samples only moved between ranks.
    """

    step: int
    rank: int
    count: int
    planned: int
    digest_difference: int = 0


@dataclass(frozen=True)
class ProcessChange:
    """Ranks that were lost or joined after a step of an attempt, while the others continued.

    Args:
        attempt: Number of the attempt.
        step: The last step that the previous ranks did.
        lost: The ranks that were lost, by their numbers in the attempt.
        joined: The ranks that joined.
        why: How the lost ranks have ended, as far as their launchers knew.
    """

    attempt: int
    step: int
    lost: list[int]
    joined: list[int]
    why: list[str]

    @property
    def sentence(self) -> str:
        """The change in words."""
        parts = []
        if self.lost:
            reasons = f" ({'; '.join(self.why)})" if self.why else ""
            parts.append(f"{format_ranks(self.lost)} lost{reasons}")
        if self.joined:
            parts.append(f"{format_ranks(self.joined)} joined")
        return f"after step {self.step}: {', '.join(parts) or 'the ranks met again'}"


@dataclass
class Attempt:
    """One start of the ranks, and what its ledger shows so far.

    Args:
        number: Number of the attempt.
        world_size: Number of ranks at its start.
        start: The step of the snapshot that it resumed from, 0 if there was none.
        chain: The hash with which its chains begin.
        end: The last step that all ranks have recorded.
        chains: Hashes over all ranks, at the steps from which other attempts may have resumed. A
            step has two of them if ranks were lost after it.
        changes: Changes of the ranks, oldest first.
        mismatches: Steps that were not trained as planned.
        in_rounds: Whether ranks take microbatches in turns, see LedgerHeader.
        parent: The attempt from which this one resumed, see LedgerHeader.
    """

    number: int
    world_size: int
    start: int
    chain: str
    end: int = 0
    chains: dict[int, set[str]] = field(default_factory=dict)
    changes: list[ProcessChange] = field(default_factory=list)
    mismatches: list[SampleMismatch] = field(default_factory=list)
    in_rounds: bool = False
    parent: int = 0

    def set_end(self, step: int) -> None:
        """Set the last step that all ranks have recorded."""
        self.end = step

    def add_chain(self, chain: str) -> None:
        """Add the hash over all ranks at the last step."""
        self.chains.setdefault(self.end, set()).add(chain)

    def add_change(self, change: ProcessChange) -> None:
        """Add a change of the ranks, which makes everything after its step void."""
        self.changes.append(change)
        self.mismatches = [m for m in self.mismatches if m.step <= change.step]
        self.chains = {step: c for step, c in self.chains.items() if step <= change.step}


class LedgerError(Exception):
    """A ledger file is not what was written."""


class NoHeader(LedgerError):
    """A ledger is missing or ends in its first line, as of a rank that was lost before it."""


@dataclass(frozen=True)
class ChangeLine:
    """A line of a ledger: after a step, other ranks continue.

    Args:
        step: The last step that was done.
        ranks: The ranks that continue, in this order.
        group: Number of the change, from 1.
        why: How the ranks that were lost have ended.
    """

    step: int
    ranks: tuple[int, ...]
    group: int
    why: tuple[str, ...] = ()


class RankLedgerReader:
    """Reads one rank's ledger, some lines at a time.

    Args:
        run_dir: The run directory.
        attempt: The attempt.
        rank: The rank.
        header: The expected first line; by default that of a rank which started the attempt.

    Raises:
        LedgerError: If the header is not the expected one, or there is none.
    """

    def __init__(
        self, run_dir: Path, attempt: Attempt, rank: int, header: LedgerHeader | None = None
    ) -> None:
        self.path = ledger_path(run_dir, attempt.number, rank)
        self.attempt = attempt
        self.rank = rank
        self.label = f"attempt {attempt.number} rank {rank}"  # in messages
        # What is wrong with the next line, None if nothing is.
        self.problem: str | None = None
        # The change of ranks that the next line records. Nothing after it is read before `skip_to`.
        self.change: ChangeLine | None = None
        with self._open() as file:
            text = file.readline(MAX_LEDGER_LINE_BYTES)
            self.offset = len(text)
            self.size = os.fstat(file.fileno()).st_size
        if _is_torn(text):
            raise NoHeader(f"{self.label}: unreadable header")
        # The chain is the hash of the last line that was read.
        stored, body, self.chain = _split_line(
            text.decode(errors="replace"), "link", self.label, "header"
        )
        header = header or LedgerHeader(
            attempt.number,
            rank,
            attempt.world_size,
            attempt.start,
            attempt.chain,
            attempt.in_rounds,
            attempt.parent,
        )
        expected = asdict(header)
        stored = {"in_rounds": False, "parent": 0, **stored}
        if {name: stored.get(name) for name in expected} != expected:
            raise LedgerError(f"{self.label}: its header is another rank's or another attempt's")
        if extend_chain(header.chain, body + "}") != self.chain:
            raise LedgerError(f"{self.label}: header altered")

    @property
    def early_change(self) -> ChangeLine | None:
        """The first change of ranks if it is before the first step.

        Only the first lines can have it: a rank writes at most one line of a step that is not done.
        """
        changes = map(self._parse_change, self._first_lines)
        first = next((change for change in changes if change), None)
        return first if first and first.step == self.attempt.start else None

    @property
    def has_second_step(self) -> bool:
        """Whether the rank has begun a second step, so that all have done the first."""
        return len(self._first_lines) > 1

    @property
    def _first_lines(self) -> list[str]:
        """The first three lines after the header."""
        with self._open() as file:
            return [raw.decode(errors="replace") for raw in islice(_iterate_lines(file), 1, 4)]

    def _open(self) -> BinaryIO:
        try:
            return open_to_read(self.path)
        except (OSError, ValueError) as error:
            if self.path.exists():
                raise LedgerError(f"{self.label}: {self.path.name} cannot be read") from error
            kind = LedgerError if self.path.is_symlink() else NoHeader  # no kill leaves a link
            raise kind(f"{self.label}: {self.path.name} is missing") from error

    def read(self, planned: PlannedSteps, column: int) -> int:
        """Read lines up to the end of the planned steps, of the file, a problem, or a change.

        Args:
            planned: The steps to read.
            column: This rank's column in `planned`.

        Returns:
            The number of these steps that the rank has done. It is negative if a change makes a
            step before them void.
        """
        done = 0
        expected_steps = zip(
            count_from(planned.first + 1),
            planned.epochs.tolist(),
            planned.counts[:, column].tolist(),
            planned.digests[:, column].tolist(),
            strict=False,
        )
        with self._open() as file:
            file.seek(self.offset)
            lines = zip(expected_steps, _iterate_lines(file), strict=False)
            for (step, epoch, count, digest), raw in lines:
                text = raw.decode(errors="replace")
                body = format_step(step, epoch, count, digest)
                chain = extend_chain(self.chain, body)
                if text != format_line(body, chain):
                    if _is_torn(raw) or self._parse_change(text):
                        break
                    expected = {"epoch": epoch, "count": count, "digest": f"{digest:016x}"}
                    try:
                        chain = self._read_mismatch(text, step, expected)
                    except LedgerError as error:
                        self.problem = str(error)
                        break
                self.chain = chain
                self.offset += len(raw)
                done += 1
            file.seek(self.offset)
            next_line = file.readline(MAX_LEDGER_LINE_BYTES)
        self.change = self._parse_change(next_line.decode(errors="replace"))
        return done if self.change is None else min(done, self.change.step - planned.first)

    def skip_to(self, change: ChangeLine) -> None:
        """Skip to the line after this change, or to the end if the rank was lost before it.

        Raises:
            LedgerError: If a line before it was altered.
        """
        with self._open() as file:
            file.seek(self.offset)
            for raw in _iterate_lines(file):
                if _is_torn(raw):
                    break
                text = raw.decode(errors="replace")
                _, body, chain = _split_line(text, "chain", self.label, "line")
                if extend_chain(self.chain, body) != chain:
                    raise LedgerError(
                        f"{self.label}: a line before step {change.step + 1} was altered"
                    )
                self.chain = chain
                self.offset += len(raw)
                parsed = self._parse_change(text)
                if parsed and parsed.group >= change.group:
                    break
        self.change = None

    def _parse_change(self, text: str) -> ChangeLine | None:
        """Return the change that a line records, None for another line.

        The line's hash is not verified here, but in `skip_to`.
        """
        try:
            line = json.loads(text)
            step = line["step"]
            ranks = line["ranks"]
            group = line["group"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not isinstance(ranks, list) or not all(map(is_count, [step, group, *ranks])):
            return None
        why = line.get("why")
        reasons = why if isinstance(why, list) else []
        texts = [to_one_line(make_printable(text)) for text in reasons if isinstance(text, str)]
        return ChangeLine(step, tuple(ranks), group, tuple(texts))

    def _read_mismatch(self, text: str, step: int, planned: dict[str, Any]) -> str:
        """Note the samples of a line that is not the planned one.

        Returns:
            The hash of the line.

        Raises:
            LedgerError: If the line is not what the rank wrote.
        """
        line, body, chain = _split_line(text, "chain", self.label, f"line after step {step - 1}")
        stored_step = line.get("step", step)
        if extend_chain(self.chain, body) != chain:
            raise LedgerError(
                f"{self.label}: the line of step {stored_step} was altered or moved,"
                " or one before it was deleted"
            )
        if stored_step != step:
            raise LedgerError(f"{self.label}: step {step} is missing")
        if not is_count(line.get("count")):
            raise LedgerError(f"{self.label}: the line of step {step} names no number of samples")
        if {name: line.get(name) for name in planned} != planned:
            difference = _parse_digest(line.get("digest")) - _parse_digest(planned["digest"])
            self.attempt.mismatches.append(
                SampleMismatch(
                    step, self.rank, line["count"], planned["count"], difference % (1 << 64)
                )
            )
        return chain


def _iterate_lines(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.readline(MAX_LEDGER_LINE_BYTES), b"")


def _is_torn(raw: bytes) -> bool:
    """Return whether a line has no end, as a kill leaves the last one."""
    return not raw.endswith(b"\n") and len(raw) < MAX_LEDGER_LINE_BYTES


def _parse_digest(text: Any) -> int:
    """Return the digest in a line, 0 if it is not one."""
    return int(text, 16) if isinstance(text, str) and HEX_DIGEST.fullmatch(text) else 0


def _split_line(text: str, name: str, label: str, kind: str) -> tuple[Any, str, str]:
    """Split a line from its hash, which must be the last thing in it.

    Args:
        text: The line.
        name: The key of the hash.
        label: The rank's label, for messages.
        kind: What messages call the line.

    Returns:
        The parsed line, its text up to the hash, and the hash.

    Raises:
        LedgerError: If the line is not JSON with such a hash at its end.
    """
    try:
        line = json.loads(text)
        body = text[: text.rindex(f', "{name}"')]
        chain = line[name]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"{label}: unreadable {kind}") from error
    if text != f'{body}, "{name}": "{chain}"}}\n':
        raise LedgerError(f"{label}: {kind} was appended to after its hash")
    return line, body, chain
