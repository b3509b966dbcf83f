"""N ranks on this machine, restarted together when one is lost."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from stepladder.core.console import say
from stepladder.core.errors import FAILED, KILLED, NO_FILE, STOPPED, TERMINATED
from stepladder.launcher.local.group import LocalGroup
from stepladder.launcher.local.outcome import Failure, Killed, Raised, Refused, Success
from stepladder.rank.error_record import ErrorKind
from stepladder.rank.exit_record import note_end
from stepladder.rank.preemption import unless_ignored

ASKING = signal.SIGTERM, signal.SIGHUP  # a closed terminal asks its whole group
ONLY_FORWARDED = signal.SIGUSR1, signal.SIGUSR2  # to scripts: Slurm's warnings, which end nothing


def run_local(
    group: LocalGroup, nproc: int, max_restarts: int = 0, least: int | None = None
) -> int:
    """`nproc` ranks to their end, again from their last snapshot after a fault. Returns the exit
    code.

    least: go on with fewer ranks, but not below this, when one fails twice within a minute;
    restarts are counted anew then. Raises InputError for what a rank has found wrong with its
    input."""
    restarts, group.least = 0, least if least != nproc else None
    with handling_signals(group):
        for attempt in itertools.count():
            outcome = group.run(nproc, attempt)
            if isinstance(outcome, Success):
                return outcome.code
            if isinstance(outcome, Refused):
                if outcome.error.step is None:
                    group.output.forget()
                raise outcome.input_error
            if group.stop_asked and isinstance(outcome, Killed) and outcome.number in ASKING:
                return STOPPED  # before the first step: what was saved earlier is still there
            if group.judge.is_bug(outcome) or group.stop_asked:
                return end_badly(outcome, group.stop_asked)
            if nproc > (least or nproc) and group.judge.failed_again(outcome.rank):
                nproc, restarts = nproc - 1, 0
                say(
                    f"rank {outcome.rank} failed twice within a minute: going on with {nproc} ranks"
                )
            elif restarts == max_restarts:
                if max_restarts:
                    say(
                        f"given up after {max_restarts} restarts. HINT: --max-restarts {2 * max_restarts}"
                    )
                return end_badly(outcome)
            else:
                restarts += 1
                resuming = " from the last snapshot" if group.judge.has_steps else ""
                say(f"restarting all ranks{resuming} ({restarts} of {max_restarts} restarts)")
    raise AssertionError("the count of attempts has no end")


def end_badly(failure: Failure | None, stop_asked: int = 0) -> int:
    """Exit code 1. A batch script is also told that no rank had an error: it was killed, or asked
    to stop.
    """
    if stop_asked == signal.SIGTERM and not isinstance(failure, Raised):
        note_end(TERMINATED)
    elif isinstance(failure, Killed) and failure.number == signal.SIGKILL:
        note_end(KILLED)
    elif isinstance(failure, Raised) and failure.error.kind is ErrorKind.STORAGE:
        note_end(NO_FILE)
    return FAILED


@contextmanager
def handling_signals(group: LocalGroup) -> Iterator[None]:
    """Signals ask the ranks to stop, or reach them; at the block's end nothing of the group is
    left.
    """
    wanted = dict.fromkeys(group.spec.stop_signals, group.ask_to_stop)
    if group.spec.is_script:
        wanted = dict.fromkeys(ONLY_FORWARDED, group.forward) | wanted
    with ExitStack() as at_end:
        for number in unless_ignored(wanted):
            at_end.callback(signal.signal, number, signal.signal(number, wanted[number]))
        at_end.enter_context(closing(group))
        yield
