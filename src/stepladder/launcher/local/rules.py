"""From what is known of a group of ranks at its end, by rules in their order, to how it ended. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stepladder.core.exit_codes import STOPPED, is_failure
from stepladder.launcher.diagnose.hang import Explanation
from stepladder.launcher.local.outcome import (
    Exited,
    Interrupted,
    Killed,
    Outcome,
    Raised,
    Refused,
    Stalled,
    Success,
)
from stepladder.rank.error_record import ErrorKind, RankError

LATE = "asked to stop, the ranks did not come to a step's end in time, and were ended"


@dataclass(frozen=True)
class Evidence:
    """What is known of a group when it ends.

    codes: exit code by rank, in the ranks' order; None of one that had not ended.  errors: that ranks have left.
    explanation: why nothing moved, where it was asked for: after a failure that may come of it, or a long wait.
    was_first: that was known before any rank gave up.  mismatch: what ranks brought to one collective that did
    not fit, seen in their words after a failure.  out_of_memory: the kernel killed for memory meanwhile.
    stop_signal: by which the launcher was asked to stop, or 0.
    """

    codes: Mapping[int, int | None]
    errors: Sequence[RankError] = ()
    explanation: Explanation | None = None
    was_first: bool = False
    mismatch: Explanation | None = None
    out_of_memory: bool = False
    stop_signal: int = 0

    @property
    def failed(self) -> dict[int, int]:
        """The exit codes of ranks that neither finished nor stopped well."""
        return {rank: code for rank, code in self.codes.items() if code is not None and is_failure(code)}


Rule = Callable[[Evidence], Outcome | None]


def ended_well(seen: Evidence) -> Outcome | None:
    if seen.failed or seen.explanation is not None:
        return None
    if STOPPED in seen.codes.values():
        return Success(STOPPED)
    return None if None in seen.codes.values() else Success()


def bad_input(seen: Evidence) -> Outcome | None:
    return next((Refused(e) for e in seen.errors if e.kind == ErrorKind.BAD_INPUT), None)


def interrupted(seen: Evidence) -> Outcome | None:
    return Interrupted(seen.stop_signal) if seen.stop_signal else None


def stalled_first(seen: Evidence) -> Outcome | None:
    """What ranks then say is that they have waited in vain. Shown in full when it was seen."""
    found = seen.explanation if seen.was_first else None
    return Stalled(found.rank, found.sentence) if found is not None else None


def raised(seen: Evidence) -> Outcome | None:
    """The earliest error that no other rank's end explains."""
    causes = sorted((e for e in seen.errors if not e.is_consequence), key=lambda e: e.time)
    return Raised(causes[0]) if causes else None


def mismatched(seen: Evidence) -> Outcome | None:
    found = seen.mismatch
    return Stalled(found.rank, found.with_cause) if found is not None else None


def aborted(seen: Evidence) -> Outcome | None:
    """gloo aborts a rank, with no word, where collectives do not fit: its stack says more than its signal."""
    found = seen.explanation
    return Stalled(found.rank, found.with_cause) if found is not None and found.is_abort else None


def killed(seen: Evidence) -> Outcome | None:
    by_signal = (item for item in seen.failed.items() if item[1] < 0)
    return next((Killed(rank, -code, seen.out_of_memory) for rank, code in by_signal), None)


def stalled(seen: Evidence) -> Outcome | None:
    found = seen.explanation
    return Stalled(found.rank, found.sentence) if found is not None else None


def exited(seen: Evidence) -> Outcome | None:
    said = {error.rank for error in seen.errors}
    return next((Exited(rank, code) for rank, code in seen.failed.items() if rank not in said), None)


def lost_others(seen: Evidence) -> Outcome | None:
    """Ranks have lost others, but none of these here: the cause is on another node."""
    return Raised(seen.errors[0]) if seen.errors else None


def late(_seen: Evidence) -> Outcome:
    return Stalled(None, LATE)


CAUSES: tuple[Rule, ...] = (
    stalled_first, raised, mismatched, aborted, killed, stalled, exited, lost_others, late,
)  # fmt: skip
RULES: tuple[Rule, ...] = (ended_well, bad_input, *CAUSES)
RULES_OF_SCRIPTS: tuple[Rule, ...] = (ended_well, bad_input, interrupted, *CAUSES)


def conclude(seen: Evidence, rules: Sequence[Rule] = RULES) -> Outcome:
    """What the first rule says that has something to say."""
    return next(found for rule in rules if (found := rule(seen)) is not None)
