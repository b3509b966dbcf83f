"""Verifying the ledgers of all ranks of an attempt together.

Many lines of one rank are read, then many of the next one, so no file stays open and little is in
memory, whatever the number of ranks and steps.
"""

from __future__ import annotations

from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.jsonl import is_count
from stepladder.core.plan import Plan
from stepladder.core.typed_file import open_to_read, parse_json
from stepladder.core.world import MAX_RANKS
from stepladder.storage.ledger import (
    LedgerHeader,
    extend_chain,
    format_line,
    format_step,
    join_chains,
    ledger_path,
)
from stepladder.storage.ledger_plan import compute_planned_steps
from stepladder.storage.ledger_rank_reader import (
    MAX_LEDGER_LINE_BYTES,
    Attempt,
    ChangeLine,
    LedgerError,
    NoHeader,
    ProcessChange,
    RankLedgerReader,
)
from stepladder.storage.run_files import LEDGER_FOLDER, list_ledgers

MAX_LINES_PER_READ = 1 << 17  # of all ranks together
MAX_SAMPLES_PER_READ = 1 << 20
MIN_LINE_BYTES = len(format_line(format_step(0, 0, 0, 0), extend_chain("", "")))


def read_attempts(run_dir: Path, problems: list[str]) -> tuple[int, list[Attempt]]:
    """Read the headers of all attempts.

    Args:
        run_dir: The run directory.
        problems: A list to which problems are added.

    Returns:
        The number of attempts, and those of them that trained.

    Raises:
        InputError: If the run has no ledger.
    """
    ranks: dict[int, list[int]] = {}
    for number, rank in sorted(list_ledgers(run_dir)):
        ranks.setdefault(number, []).append(rank)
    if not ranks:
        raise InputError(f"{run_dir} has no ledger of its steps", f"ls {run_dir / LEDGER_FOLDER}")
    attempts = [_read_attempt(run_dir, number, ranks[number], problems) for number in ranks]
    return len(ranks), [attempt for attempt in attempts if attempt is not None]


def _read_attempt(
    run_dir: Path, number: int, ranks: list[int], problems: list[str]
) -> Attempt | None:
    """Return an attempt by its first readable header, None if it was killed before its first step.

    Every rank writes its header before the first step is done. Headers may therefore be missing
    only if there are no steps.
    """
    attempts = []
    has_trained = False
    for rank in ranks:
        try:
            with open_to_read(ledger_path(run_dir, number, rank)) as file:
                attempt = parse_header(file.readline(MAX_LEDGER_LINE_BYTES), number)
                if attempt is not None and attempt.world_size:
                    attempts.append(attempt)
                has_trained = has_trained or bool(file.read(1))
        except (OSError, ValueError):  # `verify_attempt` reports it
            has_trained = True
    if not attempts:
        if has_trained:
            problems.append(f"attempt {number}: no rank's header can be read")
        return None
    if not has_trained and len(attempts) < attempts[0].world_size:
        return None
    return attempts[0]


def parse_header(text: bytes, number: int) -> Attempt | None:
    """Return the attempt that a header describes, None if the line is torn or not a header."""
    try:
        header = parse_json(text, LedgerHeader)
    except ValueError:
        return None
    start = header.resumed_from_step
    has_valid_numbers = all(map(is_count, [header.world_size, start, header.parent]))
    if not has_valid_numbers or header.world_size > MAX_RANKS:
        return None
    return Attempt(
        number,
        header.world_size,
        start,
        header.chain,
        start,
        in_rounds=header.in_rounds,
        parent=header.parent,
    )


def verify_attempt(run_dir: Path, attempt: Attempt, plan: Plan, points: list[int]) -> None:
    """Verify every line of an attempt, and note in it what they show.

    A torn last line, as a kill leaves it, counts as a step that was not done.

    Args:
        run_dir: The run directory.
        attempt: The attempt; its end, chains, changes and mismatches are set.
        plan: The run's plan.
        points: The steps at which the hash over all ranks is needed.

    Raises:
        LedgerError: At the first line that was altered, deleted or moved.
    """
    readers = _open_first_readers(run_dir, attempt)
    if not readers:
        return
    max_steps = count_steps_per_read(attempt.world_size, plan.global_batch)
    while True:
        max_lines = min(reader.size - reader.offset for reader in readers) // MIN_LINE_BYTES + 1
        next_points = [point for point in points if point > attempt.end]
        end = min([attempt.end + min(max_steps, max_lines), *next_points])
        planned = compute_planned_steps(plan, attempt.end, end, len(readers), attempt.in_rounds)
        stops = [
            (reader.read(planned, column), reader.problem is None, column)
            for column, reader in enumerate(readers)
        ]
        num_done, is_valid, column = min(stops)
        attempt.set_end(attempt.end + num_done)
        if attempt.end < end:
            if not is_valid:
                raise LedgerError(readers[column].problem)
            changes = [reader.change for reader in readers if reader.change]
            if not changes:
                return
            change = max(changes, key=lambda line: line.group)
            if attempt.end < change.step:
                raise LedgerError(f"{readers[column].label}: step {attempt.end + 1} is missing")
            attempt.set_end(change.step)
            readers = _apply_change(change, readers, attempt, run_dir)
        if attempt.end in points:
            attempt.add_chain(join_chains([reader.chain for reader in readers]))


def _open_first_readers(run_dir: Path, attempt: Attempt) -> list[RankLedgerReader]:
    """Open the ledgers of the ranks with which the attempt began.

    A rank may have been lost before it had written its header. Its ledger may be missing if the
    others continued without it from the first step, or did not finish a step.

    LedgerError is raised for any other ledger that is missing or has no header.

    Returns:
        The readers; none if no step can have been done.
    """
    readers = []
    problems: dict[int, LedgerError] = {}
    for rank in range(attempt.world_size):
        try:
            readers.append(RankLedgerReader(run_dir, attempt, rank))
        except NoHeader as error:
            problems[rank] = error
    if not problems:
        return readers
    changes = [change for reader in readers if (change := reader.early_change)]
    last = max(changes, key=lambda line: line.group, default=None)
    if last is None and not any(reader.has_second_step for reader in readers):
        return []
    for rank, problem in problems.items():
        if last is None or rank in last.ranks:
            raise problem
    return readers


def _apply_change(
    change: ChangeLine, readers: list[RankLedgerReader], attempt: Attempt, run_dir: Path
) -> list[RankLedgerReader]:
    """Note a change of ranks in the attempt; lines after its step are void.

    Args:
        change: The change.
        readers: The readers of the ranks before it.
        attempt: The attempt.
        run_dir: The run directory.

    Returns:
        The readers of the ranks that continue, at their lines after the change.
    """
    by_rank = {reader.rank: reader for reader in readers}
    lost_ranks = sorted(by_rank.keys() - set(change.ranks))
    joined_ranks = sorted(set(change.ranks) - by_rank.keys())
    for rank in joined_ranks:
        header = LedgerHeader(attempt.number, rank, 0, 0, "")
        by_rank[rank] = RankLedgerReader(run_dir, attempt, rank, header)
    attempt.add_change(
        ProcessChange(attempt.number, change.step, lost_ranks, joined_ranks, list(change.why))
    )
    remaining = [by_rank[rank] for rank in change.ranks]
    for reader in remaining:
        reader.skip_to(change)
    return remaining


def count_steps_per_read(world_size: int, global_batch: int) -> int:
    """Return how many steps to read at once: their lines and samples are in memory together."""
    steps_by_lines = MAX_LINES_PER_READ // world_size
    steps_by_samples = MAX_SAMPLES_PER_READ // global_batch
    return max(1, min(steps_by_lines, steps_by_samples))
