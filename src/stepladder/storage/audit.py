"""The audit: a proof, from a run's ledger, that every sample was trained exactly once per epoch.

The final weights come from a line of attempts. The chain of an attempt begins with the hash of the
snapshot from which it resumed, so the attempt before it is the one whose chains have that hash.
Steps that were rolled back are `superseded`. The digest of each surviving step is recomputed from
the plan. The memory needed is that of one epoch's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from stepladder.core import typed_file
from stepladder.core.errors import InputError, to_one_line
from stepladder.core.numbers import format_count
from stepladder.core.plan import Plan
from stepladder.storage.ledger_attempts import read_attempts, verify_attempt
from stepladder.storage.ledger_rank_reader import (
    Attempt,
    LedgerError,
    ProcessChange,
    SampleMismatch,
)
from stepladder.storage.run_config import open_config
from stepladder.storage.run_files import (
    CONFIG_FILE,
    LEDGER_FOLDER,
    MANIFEST_FILE,
    RESULT_FILE,
    SNAPSHOTS_FOLDER,
    list_snapshots,
)

ORDER_BYTES_PER_ROW = 32  # while an epoch's order is made
MAX_EPOCHS = 1 << 21
MAX_REPORTED_MISMATCHES = 100


@dataclass
class _EpochCount:
    """How many samples of an epoch were lost or repeated, or never seen.

    Never seen are those of steps that are not yet reached, and those that the plan leaves out.
    """

    epoch: int
    lost: int = 0
    repeated: int = 0
    never_seen: int = 0

    def add(self, num_lost: int = 0, num_repeated: int = 0, num_never_seen: int = 0) -> None:
        """Add to the counts."""
        self.lost += num_lost
        self.repeated += num_repeated
        self.never_seen += num_never_seen


@dataclass
class Audit:
    """The result of an audit.

    Args:
        epochs: The counts of each epoch.
        superseded: Number of steps that were rolled back.
        attempts: How often the ranks were started.
        history: Changes of the ranks within attempts, oldest first.
        problems: Sentences that name file, step and rank.
    """

    epochs: list[_EpochCount]
    superseded: int
    attempts: int
    history: list[ProcessChange]
    problems: list[str]

    @property
    def changes(self) -> int:
        """The number of changes of the ranks."""
        return len(self.history)

    @property
    def lost(self) -> int:
        """The number of samples that were not trained."""
        return sum(epoch.lost for epoch in self.epochs)

    @property
    def repeated(self) -> int:
        """The number of samples that were trained more than once in an epoch."""
        return sum(epoch.repeated for epoch in self.epochs)

    @property
    def ok(self) -> bool:
        """Whether every sample was trained once."""
        return not self.problems and not self.lost and not self.repeated

    def as_json(self) -> dict[str, Any]:
        """Return what `audit --json` prints."""
        return {
            "schema": 1,
            **asdict(self),
            "lost": self.lost,
            "repeated": self.repeated,
            "changes": self.changes,
            "ok": self.ok,
        }


@dataclass(frozen=True)
class _StoredResult:
    """The entry of result.json that the audit reads."""

    steps: int


@dataclass(frozen=True)
class _ManifestHead:
    """The entries of a snapshot's manifest that the audit reads.

    `ledger` is the hash over the chains of all ranks at the snapshot's step.
    """

    step: int
    ledger: str


@dataclass(frozen=True)
class SurvivingSteps:
    """Steps of one attempt, first and last included, that the final weights contain."""

    attempt: Attempt
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1


def audit(run_dir: Path) -> Audit:
    """Audit a run. Raises InputError if it has no ledger."""
    with open_config(run_dir) as config:
        plan = Plan.from_json(config["plan"])
    problems: list[str] = []
    snapshots = read_snapshot_chains(run_dir)
    num_attempts, attempts = verify_ledgers(run_dir, plan, snapshots, problems)
    line = find_surviving_steps(attempts, problems)
    _check_newest_snapshot(snapshots, line, problems)
    last_in_ledger = line[-1].last if line else 0
    last = max(last_in_ledger, _read_result_steps(run_dir, problems))
    epochs = _compare_with_plan(run_dir, plan, line, last, problems)
    num_trained = sum(attempt.end - attempt.start for attempt in attempts)
    superseded = num_trained - sum(map(len, line))
    history = [change for attempt in attempts for change in attempt.changes]
    return Audit(epochs, superseded, num_attempts, history, problems)


def verify_ledgers(
    run_dir: Path, plan: Plan, snapshots: dict[int, str], problems: list[str]
) -> tuple[int, list[Attempt]]:
    """Verify every line of all ledgers.

    Args:
        run_dir: The run directory.
        plan: The run's plan.
        snapshots: The hash that each snapshot has, by its step.
        problems: A list to which problems are added.

    Returns:
        The number of attempts, and those of them that trained.
    """
    _validate_order_fits_memory(run_dir, plan)
    num_attempts, attempts = read_attempts(run_dir, problems)
    points = sorted({attempt.start for attempt in attempts}.union(snapshots))
    for attempt in attempts:
        try:
            verify_attempt(run_dir, attempt, plan, points)
        except LedgerError as error:
            problems.append(str(error))
    return num_attempts, attempts


def _validate_order_fits_memory(run_dir: Path, plan: Plan) -> None:
    """Raise InputError if an epoch's order does not fit into memory: config.json may be damaged."""
    if plan.chunks is None:
        num_rows = plan.num_samples
    else:
        num_rows = sum(-(-rows // per_chunk) for rows, per_chunk in plan.chunks.shards)
    needed = num_rows * ORDER_BYTES_PER_ROW
    free = psutil.virtual_memory().available
    if needed > free:
        raise InputError(
            f"{run_dir / CONFIG_FILE} names {plan.num_samples} samples, whose order takes"
            f" {needed >> 20} MiB of memory; {free >> 20} MiB are free",
            "a machine with more memory, if that number is right",
        )


def find_surviving_steps(attempts: list[Attempt], problems: list[str]) -> list[SurvivingSteps]:
    """Return the steps that the final weights contain, oldest first."""
    line: list[SurvivingSteps] = []
    if not attempts:
        return line
    attempt = attempts[-1]
    end = attempt.end
    while True:
        line.insert(0, SurvivingSteps(attempt, attempt.start + 1, end))
        if attempt.start == 0:
            if attempt.chain:
                problems.append(
                    f"attempt {attempt.number} starts at step 0 with a chain of something before"
                )
            return line
        parents = [
            earlier
            for earlier in attempts
            if earlier.number < attempt.number and _has_resumed_from(attempt, earlier)
        ]
        if not parents:
            problems.append(
                f"attempt {attempt.number} resumed from step {attempt.start},"
                " which no earlier attempt's ledger proves"
            )
            return line
        end = attempt.start
        attempt = parents[-1]


def _has_resumed_from(attempt: Attempt, earlier: Attempt) -> bool:
    """Return whether an attempt began with the state that an earlier one had at that step."""
    if attempt.parent:
        return earlier.number == attempt.parent and earlier.start <= attempt.start <= earlier.end
    return attempt.chain in earlier.chains.get(attempt.start, ())


def read_snapshot_chains(run_dir: Path) -> dict[int, str]:
    """Return the hash over all ranks that each snapshot has, by its step."""
    chains = {}
    for path in list_snapshots(run_dir / SNAPSHOTS_FOLDER):
        with suppress(OSError, ValueError):  # a damaged snapshot proves nothing; `train` reports it
            text = typed_file.read_file(path / MANIFEST_FILE)
            manifest = typed_file.parse_json(text, _ManifestHead)
            chains[manifest.step] = manifest.ledger
    return chains


def _check_newest_snapshot(
    chains: dict[int, str], line: list[SurvivingSteps], problems: list[str]
) -> None:
    """Add a problem if the ledger does not have the newest snapshot's hash.

    The ledger is on disk before the snapshot, so lines are missing then.
    """
    if not chains:
        return
    step = max(chains)
    is_proven = any(
        step <= steps.last and chains[step] in steps.attempt.chains.get(step, ()) for steps in line
    )
    if not is_proven:
        problems.append(
            f"the ledger does not lead to the snapshot of step {step}: lines are missing at its end"
        )


def _read_result_steps(run_dir: Path, problems: list[str]) -> int:
    """Return the number of steps of a finished run, 0 if it is not finished."""
    try:
        text = typed_file.read_file(run_dir / RESULT_FILE)
        return typed_file.parse_json(text, _StoredResult).steps
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        problems.append(f"{RESULT_FILE} cannot be read ({to_one_line(error)})")
        return 0


def _compare_with_plan(
    run_dir: Path, plan: Plan, line: list[SurvivingSteps], last: int, problems: list[str]
) -> list[_EpochCount]:
    """Count the samples that were lost or repeated in each epoch.

    Args:
        run_dir: The run directory.
        plan: The run's plan.
        line: The surviving steps.
        last: The last step of the run. Steps before it that no rank recorded are lost.
        problems: A list to which the steps are added that were not trained as planned.

    Returns:
        The counts of each epoch.

    Raises:
        InputError: If the last step is absurdly late.
    """
    per_epoch = plan.steps_per_epoch
    if last > MAX_EPOCHS * per_epoch:
        raise InputError(
            f"{LEDGER_FOLDER}/ or {RESULT_FILE} of {run_dir} speaks of step {last},"
            f" in epoch {last // per_epoch}",
            f"the right {CONFIG_FILE} there: by it an epoch has {format_count(per_epoch, 'step')}",
        )
    last_epoch = plan.epoch_of_step(max(last - 1, 0))
    epochs = [_EpochCount(number) for number in range(last_epoch + 1)]
    for epoch in epochs:
        epoch.add(num_never_seen=plan.num_dropped)
    for first, end in _find_unrecorded(line, last):
        for epoch in epochs[first // per_epoch : -(-end // per_epoch)]:
            begin = epoch.epoch * per_epoch
            num_lost = _count_samples(plan, max(first, begin), min(end, begin + per_epoch))
            epoch.add(num_lost=num_lost)
    num_never_seen = _count_samples(plan, last, len(epochs) * per_epoch)
    epochs[-1].add(num_never_seen=num_never_seen)
    for steps in line:
        mismatches = [m for m in steps.attempt.mismatches if steps.first <= m.step <= steps.last]
        for mismatch in mismatches:
            num_repeated = max(0, mismatch.count - mismatch.planned)
            epoch = epochs[plan.epoch_of_step(mismatch.step - 1)]
            epoch.add(num_lost=mismatch.planned, num_repeated=num_repeated)
        mismatches.sort(key=lambda mismatch: (mismatch.step, mismatch.rank))
        problems += _describe_mismatches(steps.attempt, mismatches)
    return epochs


def _find_unrecorded(line: list[SurvivingSteps], last: int) -> list[tuple[int, int]]:
    """Return the steps [first, end) up to the last one that no surviving attempt has recorded."""
    if not line:
        return [(0, last)]
    before = (0, line[0].first - 1)
    after = (line[-1].last, last)
    return [before, after]


def _count_samples(plan: Plan, first: int, end: int) -> int:
    """Return the number of samples of the steps [first, end) of one epoch, counted from 0."""
    if first >= end:
        return 0
    lo, _ = plan.batch(first)
    _, hi = plan.batch(end - 1)
    return hi - lo


def _describe_mismatches(attempt: Attempt, mismatches: list[SampleMismatch]) -> Iterator[str]:
    """Yield a line for each of the first mismatches: with other data, every step is one."""
    for mismatch in mismatches[:MAX_REPORTED_MISMATCHES]:
        yield (
            f"attempt {attempt.number}: step {mismatch.step}, rank {mismatch.rank} trained"
            f" other samples than planned ({mismatch.count} of {mismatch.planned})"
        )
    num_more = len(mismatches) - MAX_REPORTED_MISMATCHES
    if num_more > 0:
        yield (
            f"attempt {attempt.number}: {num_more} more such steps,"
            f" up to step {mismatches[-1].step}"
        )
