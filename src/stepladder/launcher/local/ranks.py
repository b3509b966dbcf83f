"""N ranks on this machine, restarted together when one is lost."""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepladder.core.errors import InputError
from stepladder.launcher.diagnose.cause import likely_cause
from stepladder.launcher.local.group import STOPPED, LocalGroup, Outcome, say
from stepladder.rank.exit_record import KILLED, TERMINATED, note_end
from stepladder.rank.preemption import HANDLED

SECONDS_BETWEEN_FAULTS = 60.0  # a rank that fails twice within them will not recover


def run_local(
    group: LocalGroup,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    nproc: int,
    max_restarts: int,
    least: int | None = None,
    judge: Judge | None = None,
) -> int:
    """Run `work(*args)` on `nproc` ranks, again from its last snapshot after a fault. Returns the exit code.

    least: go on with fewer ranks, but not below this, when one fails twice within a minute; restarts are
    counted anew then. A rank killed by a signal is a fault. An exception is one too, once: at the same
    step again, or before the first step, it is a bug. Each traceback is shown once.
    """
    judge, restarts = judge or Judge(), 0
    with handling_signals(group):
        for attempt in itertools.count():
            outcome = group.run(work, args, nproc, attempt)
            if outcome.code != 1:
                return end_well(outcome)
            if group.stop_asked and outcome.signal == signal.SIGTERM:
                return STOPPED  # before the first step: what was saved earlier is still there
            if judge.is_bug(outcome) or group.stop_asked:
                return failed(outcome, group.stop_asked)
            if nproc > (least or nproc) and judge.failed_again(outcome.rank):
                nproc, restarts = nproc - 1, 0
                say(f"rank {outcome.rank} failed twice within a minute: going on with {nproc} ranks")
            elif restarts == max_restarts:
                if max_restarts:
                    say(f"given up after {max_restarts} restarts. HINT: --max-restarts {2 * max_restarts}")
                return failed(outcome)
            else:
                restarts += 1
                say(f"restarting all ranks{judge.resuming} ({restarts} of {max_restarts} restarts)")
    raise AssertionError("the count of attempts has no end")


def failed(outcome: Outcome, stop_asked: int = 0) -> int:
    """Exit code 1. A batch script is also told that no rank had an error: it was killed, or asked to stop."""
    if outcome.error is None and stop_asked == signal.SIGTERM:
        note_end(TERMINATED)
    elif outcome.signal == signal.SIGKILL:
        note_end(KILLED)
    return 1


def end_well(outcome: Outcome) -> int:
    """The exit code of ranks that have not failed. Raises what they found wrong with the input."""
    if outcome.code == 2 and outcome.error:
        raise InputError(outcome.error.text, outcome.error.hint)
    return outcome.code


class Judge:
    """Shows failures, and tells a bug from a fault by what has failed before."""

    resuming = " from the last snapshot"

    def __init__(self) -> None:
        self.shown: set[str] = set()
        self.step: int | None = None
        self.last_failure: dict[int | None, float] = {}

    def is_bug(self, outcome: Outcome) -> bool:
        """Show the failure, and say whether a restart would be in vain."""
        self.show(outcome)
        error = outcome.error
        if error is None:
            self.step = None
            return False
        again, self.step = error.step == self.step, error.step
        if error.step is None or again:
            say("not restarted" if error.step is None else "a bug, not a fault: the same step failed twice")
        return error.step is None or again

    def show(self, outcome: Outcome) -> None:
        """What failed, why it probably did, and the traceback the first time."""
        say(outcome.describe())
        error = outcome.error
        if error is not None and error.trace not in self.shown:
            self.shown.add(error.trace)
            say("".join(f"  [rank {error.rank}] {line}\n" for line in error.trace.splitlines()).rstrip())
        if cause := likely_cause(outcome.error, outcome.signal, outcome.out_of_memory):
            say(cause)

    def failed_again(self, rank: int | None) -> bool:
        """Whether this rank's failure before is not long ago."""
        now, before = time.monotonic(), self.last_failure.get(rank, -math.inf)
        self.last_failure[rank] = now
        if rank is None or now - before > SECONDS_BETWEEN_FAULTS:
            return False
        self.last_failure.clear()
        return True


@contextmanager
def handling_signals(group: LocalGroup) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask the ranks to stop; at the block's end nothing of the group is left."""
    before = {number: signal.signal(number, group.ask_to_stop) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        group.close()
