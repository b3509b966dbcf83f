"""How a group of ranks ended, from what is known of it, in order of weight."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.errors import DONE, STOPPED, InputError, is_failure
from stepladder.core.surroundings import ASK
from stepladder.launcher.diagnose.hang import ABORTED, Explanation
from stepladder.rank.error_record import ErrorKind, RankError

LATE = "asked to stop, the ranks did not reach the end of a step in time, and were ended"

# The likely cause of a rank's end, with a HINT: what people ask about most, told by its traces.
ERRORS = {
    ErrorKind.OUT_OF_MEMORY: "out of memory. HINT: a smaller --microbatch; train JOB --dry-run tells the need",
    ErrorKind.LIMIT: f"a limit of this machine. HINT: {ASK}",
    ErrorKind.IMPORT: f"an import. HINT: install what is missing for {sys.executable}, which runs the ranks",
    ErrorKind.PORT_IN_USE: "the port is in use. HINT: leave --master-port out for a free one, or another number",
    ErrorKind.NOT_MET: "the ranks did not meet. HINT: MASTER_ADDR and MASTER_PORT must lead all ranks to rank 0",
}
SIGNALS: dict[int, str] = {
    signal.SIGKILL: "`kill -9` from outside: a person, the batch system, or a container's limit of memory",
    signal.SIGSEGV: "a crash in compiled code. HINT: python -X faulthandler; do all nodes have the same versions?",
    signal.SIGBUS: "often /dev/shm is full. HINT: df -h /dev/shm; docker run --ipc=host, or fewer loading workers",
    signal.SIGABRT: ABORTED,
    signal.SIGILL: "a package built for another processor. HINT: install it on this machine",
}
NO_MEMORY = (
    "out of memory, so the kernel ended it. HINT: fewer workers; train JOB --dry-run tells the need"
)


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
        if self.error.kind in (ErrorKind.CORRUPT, ErrorKind.RANKS_DIFFER):
            return self.error.text
        at = "" if self.error.step is None else f" at step {self.error.step}"
        first = self.error.text.partition("\n")[0][:200]  # empty for a plain `assert`
        if self.error.kind is ErrorKind.STORAGE:
            return f"rank {self.rank} failed{at}: {self.error.text}"
        return f"rank {self.rank} failed{at}: {self.error.name}: {first}".rstrip(": ")

    @property
    def in_short(self) -> str:
        at = "" if self.error.step is None else f" at step {self.error.step}"
        return f"rank {self.rank} failed{at}: {self.error.name[:80]}"

    @property
    def cause(self) -> str:
        return f"cause: {ERRORS[self.error.kind]}" if self.error.kind in ERRORS else ""


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
    def in_short(self) -> str:
        return self.text

    @property
    def cause(self) -> str:
        found = (
            NO_MEMORY
            if self.number == signal.SIGKILL and self.out_of_memory
            else SIGNALS.get(self.number, "")
        )
        return found and f"cause: {found}"


@dataclass(frozen=True)
class Exited:
    """A rank has ended by itself, with an exit code and nothing more. on_purpose: by sys.exit()."""

    rank: int
    exit_code: int
    on_purpose: bool = False
    cause = ""

    @property
    def text(self) -> str:
        return f"rank {self.rank} ended with exit code {self.exit_code}"

    @property
    def in_short(self) -> str:
        return self.text


@dataclass(frozen=True)
class Stalled:
    """The ranks could not go on together. rank: the one to look at, or None.  text: who kept others
    waiting.
    """

    rank: int | None
    text: str
    cause = ""

    @property
    def in_short(self) -> str:
        return self.text[:200]


@dataclass(frozen=True)
class Mismatched:
    """Ranks have called different collectives: the code is wrong, and would be wrong again.

    rank: the one to look at.  text: what two ranks called, with their lines and the usual cause.
    """

    rank: int | None
    text: str
    cause = ""

    @property
    def in_short(self) -> str:
        return self.text[:200]


@dataclass(frozen=True)
class Orphaned:
    """The ranks that are left need what only lost ones had. No rank is to be looked at: the losses
    were shown.
    """

    text: str
    rank = None
    cause = ""

    @property
    def in_short(self) -> str:
        return self.text[:200]


# Each has a `rank` to look at, a `text`: what happened, and a `cause` with a HINT, or "" where that
# says enough. `in_short`: what files may keep of it. An exception's message may hold a secret.
Failure = Raised | Killed | Exited | Stalled | Mismatched | Orphaned
Outcome = Success | Refused | Failure


def name_of(number: int) -> str:
    """A signal's; most real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def oom_kills() -> int:
    """How often this machine's kernel has killed a process for lack of memory, since it started."""
    try:
        found = re.search(
            r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:
        return 0
    return int(found.group(1)) if found else 0


@dataclass(frozen=True)
class Evidence:
    """What is known of a group when it ends.

    codes: exit code by rank, in the ranks' order; None of one that had not ended.  errors: that
    ranks have left. explanation: why nothing moved, where it was asked for: after a failure that
    may come of it, or a long wait. was_first: that was known before any rank gave up.  mismatch:
    what ranks brought to one collective that did not fit, seen in their words after a failure.
    out_of_memory: the kernel killed for memory meanwhile. interrupted_by: the signal that asked
    ranks to stop which need not know how, as scripts; else 0."""

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
        return {
            rank: code for rank, code in self.codes.items() if code is not None and is_failure(code)
        }


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
    return (
        Stalled(None, f"stopped by {name_of(seen.interrupted_by)}") if seen.interrupted_by else None
    )


def stalled_first(seen: Evidence) -> Outcome | None:
    """What ranks then say is that they have waited in vain, unless the one they waited for says
    more.
    """
    own = {error.rank for error in seen.errors if error.is_consequence}
    told = seen.explanation and seen.explanation.rank in seen.failed.keys() - own
    return stalled(seen) if seen.was_first and not told else None


def raised(seen: Evidence) -> Outcome | None:
    """The earliest error that no other rank's end explains."""
    killed = min(seen.failed.values(), default=0) < 0  # while all meet: it answers nobody
    no_cause = {ErrorKind.OWN_END, ErrorKind.NOT_MET} if killed else {ErrorKind.OWN_END}
    causes = [
        error for error in seen.errors if not (error.is_consequence or error.kind in no_cause)
    ]
    return Raised(min(causes, key=lambda error: error.time)) if causes else None


def left_early(seen: Evidence) -> Outcome | None:
    """A rank ended well, and the others fail for want of it."""
    found = seen.explanation
    return Stalled(found.rank, found.with_cause) if found and found.is_early else None


def misfitted(seen: Evidence) -> Outcome | None:
    """gloo aborts a rank, with no word, where collectives do not fit: what is known says more than
    its signal.
    """
    if seen.mismatch is not None:
        return Mismatched(seen.mismatch.rank, seen.mismatch.with_cause)
    found = seen.explanation if seen.explanation and seen.explanation.is_abort else None
    return Stalled(found.rank, found.with_cause) if found else None


def killed(seen: Evidence) -> Outcome | None:
    by_signal = (item for item in seen.failed.items() if item[1] < 0)
    return next((Killed(rank, -code, seen.out_of_memory) for rank, code in by_signal), None)


def stalled(seen: Evidence) -> Outcome | None:
    return Stalled(seen.explanation.rank, seen.explanation.sentence) if seen.explanation else None


def exited(seen: Evidence) -> Outcome | None:
    said = {error.rank: error.kind == ErrorKind.OWN_END for error in seen.errors}
    ended = (item for item in seen.failed.items() if said.get(item[0], True))
    return next((Exited(rank, code, rank in said) for rank, code in ended), None)


def orphaned(seen: Evidence) -> Outcome | None:
    """The first word counts: who was to join those that cannot go on only says that they have gone."""
    told = [error for error in seen.errors if error.kind is ErrorKind.STATE_LOST]
    return Orphaned(min(told, key=lambda error: error.time).text) if told else None


def caused_elsewhere(seen: Evidence) -> Outcome | None:
    """Ranks have lost others, but none of these here: the cause is on another node."""
    return Raised(seen.errors[0]) if seen.errors else None


RULES: tuple[Callable[[Evidence], Outcome | None], ...] = (
    ended_well,
    bad_input,
    interrupted,
    stalled_first,
    raised,
    left_early,
    misfitted,
    killed,
    stalled,
    exited,
    orphaned,
    caused_elsewhere,
)


def conclude(seen: Evidence) -> Outcome:
    """What the first rule says that has something to say."""
    return next((found for rule in RULES if (found := rule(seen)) is not None), Stalled(None, LATE))
