"""Reading ledgers back: what each rank wrote, with every line's hash verified.

Many lines of one rank are read, then many of the next: no file stays open, and little is held in
memory, whatever the number of ranks and steps."""

from __future__ import annotations

import json
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.jsonl import is_count
from stepladder.core.plan import Plan
from stepladder.core.typed_file import open_to_read
from stepladder.core.world import MAX_RANKS
from stepladder.storage.ledger import LedgerHeader, attempt_file, join, line_text, link, step_text
from stepladder.storage.ledger_plan import planned_steps
from stepladder.storage.ledger_rank import (
    LONGEST_LINE,
    Attempt,
    Change,
    LedgerProblem,
    ProcessChange,
    RankReader,
    has_no_header,
    place_of,
)
from stepladder.storage.rundir import LEDGER, ledgers

LINES_AT_ONCE, SAMPLES_AT_ONCE = 1 << 17, 1 << 20  # of all ranks
LEAST_LINE = len(line_text(step_text(0, 0, 0, 0), link("", "")))


def attempts_of(run_dir: Path, problems: list[str]) -> tuple[int, list[Attempt]]:
    """How often the ranks were started, and those attempts that trained. Raises InputError where
    there is none.
    """
    ranks: dict[int, list[int]] = {}
    for number, rank in sorted(ledgers(run_dir)):
        ranks.setdefault(number, []).append(rank)
    if not ranks:
        raise InputError(f"{run_dir} has no ledger of its steps", f"ls {run_dir / LEDGER}")
    found = [read_attempt(run_dir, number, ranks[number], problems) for number in ranks]
    return len(ranks), [attempt for attempt in found if attempt is not None]


def read_attempt(
    run_dir: Path, number: int, ranks: list[int], problems: list[str]
) -> Attempt | None:
    """The attempt as the first readable header says; None if it was killed before it trained a
    step.

    Before the first step is done every rank has written its header, so without steps, headers may
    be missing."""
    headers, trained = [], False
    for rank in ranks:
        try:
            with open_to_read(attempt_file(run_dir, number, rank)) as file:
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
        world_size, start, chain = (
            header["world_size"],
            header["resumed_from_step"],
            header["chain"],
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if (
        is_count(world_size)
        and 0 <= world_size <= MAX_RANKS
        and is_count(start)
        and isinstance(chain, str)
    ):
        return Attempt(
            number, world_size, start, chain, start, in_rounds=header.get("in_rounds") is True
        )
    return None


def follow(run_dir: Path, attempt: Attempt, plan: Plan, points: list[int]) -> None:
    """Verify every line of an attempt: note its end, its chain at `points`, and what is not as
    planned.

    A torn last line, as a kill leaves it, is a step not done. Raises LedgerProblem at the first
    line that was altered, deleted or moved."""
    readers = first_readers(run_dir, attempt)
    if not readers:
        return
    at_once = steps_at_once(attempt.world_size, plan.global_batch)
    while True:
        left = min(reader.size - reader.offset for reader in readers) // LEAST_LINE + 1
        last = min(
            [attempt.end + min(at_once, left), *(point for point in points if point > attempt.end)]
        )
        planned = planned_steps(plan, attempt.end, last, len(readers), attempt.in_rounds)
        stops = [
            (reader.read(planned, place), reader.problem is None, place)
            for place, reader in enumerate(readers)
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
            attempt.chains.setdefault(attempt.end, set()).add(
                join([reader.chain for reader in readers])
            )


def first_readers(run_dir: Path, attempt: Attempt) -> list[RankReader]:
    """Of the ranks that the attempt began with; not of those that were lost before they wrote down
    anything, where the others went on without them from its first step; none where the others have
    not come to the end of one.

    Raises LedgerProblem.
    """
    readers, unread = [], dict[int, LedgerProblem]()
    for rank in range(attempt.world_size):
        path = attempt_file(run_dir, attempt.number, rank)
        if not path.exists():
            unread[rank] = LedgerProblem(f"{place_of(attempt, rank)}: {path.name} is missing")
            if path.is_symlink():  # which no kill leaves
                raise unread[rank]
        elif has_no_header(path):
            unread[rank] = LedgerProblem(f"{place_of(attempt, rank)}: unreadable header")
        else:
            readers.append(RankReader(run_dir, attempt, rank))
    changes = [change for reader in readers if unread and (change := reader.early_change)]
    last = max(changes, key=lambda one: one.group, default=None)
    if unread and last is None and not any(reader.came_further for reader in readers):
        return []
    for rank, problem in unread.items():
        if last is None or rank in last.ranks:
            raise problem
    return readers


def left_after(
    change: Change, readers: list[RankReader], attempt: Attempt, run_dir: Path
) -> list[RankReader]:
    """The readers of the ranks that went on, or joined, then; what was tried after its step is
    void.
    """
    by_rank = {reader.rank: reader for reader in readers}
    before = set(by_rank)
    for rank in set(change.ranks) - by_rank.keys():
        by_rank[rank] = RankReader(
            run_dir, attempt, rank, LedgerHeader(attempt.number, rank, 0, 0, "")
        )
    lost, joined = sorted(by_rank.keys() - set(change.ranks)), sorted(set(change.ranks) - before)
    attempt.changes.append(
        ProcessChange(attempt.number, change.step, lost, joined, list(change.why))
    )
    attempt.wrong = [one for one in attempt.wrong if one.step <= change.step]
    attempt.chains = {
        step: chains for step, chains in attempt.chains.items() if step <= change.step
    }
    left = [by_rank[rank] for rank in change.ranks]
    for reader in left:
        reader.skip_to(change)
    return left


def steps_at_once(world_size: int, global_batch: int) -> int:
    """Of which the ranks' lines and the samples' order are held together."""
    return max(1, min(LINES_AT_ONCE // world_size, SAMPLES_AT_ONCE // global_batch))
