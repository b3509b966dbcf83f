"""How a group of ranks ended: from what is known of it, in order of weight, to what is said and done about it."""

from __future__ import annotations

import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.console import say
from stepladder.core.errors import DONE, STOPPED, InputError, is_failure
from stepladder.launcher.diagnose.hang import ABORTED, Explanation
from stepladder.rank.error_record import ErrorKind, RankError

LATE = "asked to stop, the ranks did not come to a step's end in time, and were ended"
SECONDS_BETWEEN_FAULTS = 60.0  # a rank that fails twice within them will not recover

# The likely cause of a rank's end, with a HINT: what people ask about most, told by its traces.
ERRORS = {
    ErrorKind.OUT_OF_MEMORY: "out of memory. HINT: a smaller batch, accumulated gradients, or a lower precision",
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
NO_MEMORY = "out of memory, so the kernel ended it. HINT: a smaller batch, fewer workers or processes"


@dataclass(frozen=True)
class Success:
    """code: DONE, or STOPPED: all that is to be kept is in a snapshot."""

    code: int = DONE


@dataclass(frozen=True)
class Failure:
    """rank: the one to look at, or None.  text: what happened.

    cause: the likely one with a HINT, or "" where the text says enough itself.  error: what the rank has raised.
    number: of the signal that killed it.
    """

    rank: int | None
    text: str
    cause: str = ""
    error: RankError | None = None
    number: int = 0

    @property
    def input_error(self) -> InputError | None:
        """What the rank has found wrong with the input, and so would all others."""
        error = self.error
        return InputError(error.text, error.hint) if error and error.kind == ErrorKind.BAD_INPUT else None


Outcome = Success | Failure


def raised(error: RankError) -> Failure:
    at = "" if error.step is None else f" at step {error.step}"
    first = error.text.partition("\n")[0][:200]  # empty for a plain `assert`
    text = f"rank {error.rank} failed{at}: {error.name}: {first}".rstrip(": ")
    cause = f"cause: {ERRORS[error.kind]}" if error.kind in ERRORS else ""
    return Failure(error.rank, text, cause, error)


def killed(rank: int, number: int, out_of_memory: bool) -> Failure:
    text = f"rank {rank} was killed by {name_of(number)}"
    cause = NO_MEMORY if number == signal.SIGKILL and out_of_memory else SIGNALS.get(number, "")
    return Failure(rank, text, cause and f"cause: {cause}", number=number)


def name_of(number: int) -> str:
    """A signal's; most real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def oom_kills() -> int:
    """How often this machine's kernel has killed a process for lack of memory, since it started."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) if found else 0


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


def sayings(seen: Evidence) -> Iterator[Outcome]:
    """All that can be said of the end, the weightiest first."""
    failed = {rank: code for rank, code in seen.codes.items() if code is not None and is_failure(code)}
    stalled = [Failure(seen.explanation.rank, seen.explanation.sentence)] if seen.explanation else []
    if not failed and not stalled:
        if STOPPED in seen.codes.values():
            yield Success(STOPPED)
        if None not in seen.codes.values():
            yield Success()
    for error in seen.errors:
        if error.kind == ErrorKind.BAD_INPUT:
            yield Failure(error.rank, f"rank {error.rank} failed: {error.name}: {error.text}", error=error)
    if seen.interrupted_by:
        yield Failure(None, f"stopped by {name_of(seen.interrupted_by)}")
    if seen.was_first:
        # What ranks then say is that they have waited in vain. Its cause was shown when it was seen.
        yield from stalled
    causes = [error for error in seen.errors if not error.is_consequence]
    yield from map(raised, sorted(causes, key=lambda error: error.time))
    # gloo aborts a rank, with no word, where collectives do not fit: what is known says more than its signal.
    if found := seen.mismatch or (seen.explanation if seen.explanation and seen.explanation.is_abort else None):
        yield Failure(found.rank, found.with_cause)
    for rank, code in failed.items():
        if code < 0:
            yield killed(rank, -code, seen.out_of_memory)
    yield from stalled
    said = {error.rank for error in seen.errors}
    for rank, code in failed.items():
        if rank not in said:
            yield Failure(rank, f"rank {rank} ended with exit code {code}")
    yield from map(raised, seen.errors)  # of losses alone: the cause is on another node
    yield Failure(None, LATE)


class Judge:
    """Shows failures, and tells a bug, which comes back, from a fault, which a restart mends.

    has_steps: a failure names its step, and a restart goes on from a snapshot. Else, for scripts, no bug can be
    told from a fault.
    """

    def __init__(self, has_steps: bool) -> None:
        self.has_steps = has_steps
        self.show: Callable[[Failure], None] = self._show
        self.shown: set[str] = set()
        self.step: int | None = None
        self.last_failure: dict[int | None, float] = {}

    def is_bug(self, failure: Failure) -> bool:
        """Show the failure, and say whether a restart would be in vain.

        An exception is a fault, once: at the same step again, or before the first step, it is a bug.
        """
        self.show(failure)
        if not self.has_steps:
            return False
        before, self.step = self.step, failure.error.step if failure.error else None
        if failure.error is None or self.step not in (None, before):
            return False
        say("not restarted" if self.step is None else "a bug, not a fault: the same step failed twice")
        return True

    def _show(self, failure: Failure) -> None:
        """What failed, why it probably did, and the traceback the first time."""
        say(failure.text)
        if failure.error and failure.error.trace not in self.shown:
            self.shown.add(failure.error.trace)
            lines = failure.error.trace.splitlines()
            say("".join(f"  [rank {failure.rank}] {line}\n" for line in lines).rstrip())
        if failure.cause:
            say(failure.cause)

    def failed_again(self, rank: int | None) -> bool:
        """Whether this rank's failure before is not long ago."""
        now, before = time.monotonic(), self.last_failure.get(rank, -math.inf)
        self.last_failure[rank] = now
        if rank is None or now - before > SECONDS_BETWEEN_FAULTS:
            return False
        self.last_failure.clear()
        return True
