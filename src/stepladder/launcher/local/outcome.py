"""How a group of ranks ended: from what is known of it, by rules in their order, to what is said. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stepladder.core.errors import InputError
from stepladder.core.exit_codes import DONE, STOPPED, is_failure
from stepladder.launcher.diagnose.cause import cause_of_error, cause_of_signal
from stepladder.launcher.diagnose.hang import Explanation
from stepladder.rank.error_record import ErrorKind, RankError

LATE = "asked to stop, the ranks did not come to a step's end in time, and were ended"


@dataclass(frozen=True)
class Success:
    """code: DONE, or STOPPED: all that is to be kept is in a snapshot."""

    code: int = DONE


@dataclass(frozen=True)
class Refused:
    """A rank has found bad input, and so would all others."""

    error: RankError

    @property
    def text(self) -> str:
        return f"rank {self.error.rank} failed: {self.error.name}: {self.error.text}"

    @property
    def input_error(self) -> InputError:
        return InputError(self.error.text, self.error.hint)


@dataclass(frozen=True)
class Raised:
    """A rank has raised an exception."""

    error: RankError

    @property
    def rank(self) -> int:
        return self.error.rank

    @property
    def text(self) -> str:
        at = "" if self.error.step is None else f" at step {self.error.step}"
        first = self.error.text.partition("\n")[0][:200]  # empty for a plain `assert`
        return f"rank {self.rank} failed{at}: {self.error.name}: {first}".rstrip(": ")

    @property
    def cause(self) -> str:
        return cause_of_error(self.error.kind)


@dataclass(frozen=True)
class Killed:
    """A signal has ended a rank. out_of_memory: the kernel killed for memory meanwhile."""

    rank: int
    number: int
    out_of_memory: bool = False

    @property
    def text(self) -> str:
        return f"rank {self.rank} was killed by {name_of(self.number)}"

    @property
    def cause(self) -> str:
        return cause_of_signal(self.number, self.out_of_memory)


@dataclass(frozen=True)
class Exited:
    """A rank has ended by itself, with an exit code and nothing more."""

    rank: int
    exit_code: int
    cause = ""

    @property
    def text(self) -> str:
        return f"rank {self.rank} ended with exit code {self.exit_code}"


@dataclass(frozen=True)
class Stalled:
    """The ranks could not go on together. rank: the one to look at, or None.  text: who kept others waiting."""

    rank: int | None
    text: str
    cause = ""


def name_of(number: int) -> str:
    """A signal's; most real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


# Each has a `rank`, the one to look at, a `text`: what happened, and a `cause`: the likely one with a HINT, or ""
# where the text says enough itself.
Failure = Raised | Killed | Exited | Stalled
Outcome = Success | Refused | Failure


@dataclass(frozen=True)
class Evidence:
    """What is known of a group when it ends.

    codes: exit code by rank, in the ranks' order; None of one that had not ended.  errors: that ranks have left.
    explanation: why nothing moved, where it was asked for: after a failure that may come of it, or a long wait.
    was_first: that was known before any rank gave up.  mismatch: what ranks brought to one collective that did
    not fit, seen in their words after a failure.  out_of_memory: the kernel killed for memory meanwhile.
    interrupted_by: the signal that asked ranks to stop which need not know how, as scripts; else 0.
    """

    codes: Mapping[int, int | None]
    errors: Sequence[RankError] = ()
    explanation: Explanation | None = None
    was_first: bool = False
    mismatch: Explanation | None = None
    out_of_memory: bool = False
    interrupted_by: int = 0

    @property
    def failed(self) -> dict[int, int]:
        """The exit codes of ranks that neither finished nor stopped well."""
        return {rank: code for rank, code in self.codes.items() if code is not None and is_failure(code)}


def ended_well(seen: Evidence) -> Outcome | None:
    codes = seen.codes.values()
    if seen.failed or seen.explanation is not None:
        return None
    if STOPPED in codes:
        return Success(STOPPED)
    return None if None in codes else Success()


def bad_input(seen: Evidence) -> Outcome | None:
    return next((Refused(e) for e in seen.errors if e.kind == ErrorKind.BAD_INPUT), None)


def interrupted(seen: Evidence) -> Outcome | None:
    return Stalled(None, f"stopped by {name_of(seen.interrupted_by)}") if seen.interrupted_by else None


def stalled_first(seen: Evidence) -> Outcome | None:
    """What ranks then say is that they have waited in vain. Its cause was shown when it was seen."""
    return stalled(seen) if seen.was_first else None


def raised(seen: Evidence) -> Outcome | None:
    """The earliest error that no other rank's end explains."""
    causes = [error for error in seen.errors if not error.is_consequence]
    return Raised(min(causes, key=lambda error: error.time)) if causes else None


def misfitted(seen: Evidence) -> Outcome | None:
    """gloo aborts a rank, with no word, where collectives do not fit: what is known says more than its signal."""
    found = seen.mismatch or (seen.explanation if seen.explanation and seen.explanation.is_abort else None)
    return Stalled(found.rank, found.with_cause) if found else None


def killed(seen: Evidence) -> Outcome | None:
    by_signal = (item for item in seen.failed.items() if item[1] < 0)
    return next((Killed(rank, -code, seen.out_of_memory) for rank, code in by_signal), None)


def stalled(seen: Evidence) -> Outcome | None:
    return Stalled(seen.explanation.rank, seen.explanation.sentence) if seen.explanation else None


def exited(seen: Evidence) -> Outcome | None:
    said = {error.rank for error in seen.errors}
    return next((Exited(rank, code) for rank, code in seen.failed.items() if rank not in said), None)


def caused_elsewhere(seen: Evidence) -> Outcome | None:
    """Ranks have lost others, but none of these here: the cause is on another node."""
    return Raised(seen.errors[0]) if seen.errors else None


RULES: tuple[Callable[[Evidence], Outcome | None], ...] = (
    ended_well, bad_input, interrupted,
    stalled_first, raised, misfitted, killed, stalled, exited, caused_elsewhere,
)  # fmt: skip


def conclude(seen: Evidence) -> Outcome:
    """What the first rule says that has something to say."""
    return next((found for rule in RULES if (found := rule(seen)) is not None), Stalled(None, LATE))
