"""Runs the ranks of one node until they finish, and restarts all of them after a fault."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager

from stepladder.core.console import print_message
from stepladder.core.errors import FAILED, KILLED, STOPPED, STORAGE_FAILED, TERMINATED
from stepladder.core.signals import handle_signals
from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.outcome import BadInput, Failure, Killed, Raised, Success
from stepladder.launcher.local.recovery_policy import EndAction, decide_on_end, was_stopped
from stepladder.rank.error_record import ErrorKind
from stepladder.rank.exit_record import write_end
from stepladder.rank.preemption import drop_ignored_hangup

# Slurm's warnings: scripts get them, and they end nothing.
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def run_local(
    group: LocalGroup, nproc: int, max_restarts: int = 0, min_nproc: int | None = None
) -> int:
    """Run ranks until they finish, and resume from the last snapshot after a fault.

    Args:
        group: The ranks of this node.
        nproc: The number of ranks.
        max_restarts: How often all ranks may be restarted.
        min_nproc: The fewest ranks to continue with if one fails twice within a minute.

    Returns:
        The exit code.

    Raises:
        InputError: A rank has found bad input.
        KeyboardInterrupt: Ctrl-C has ended a script, or ranks of a job that did not train yet.
    """
    min_nproc = min_nproc or nproc
    min_ranks = None if min_nproc == nproc else min_nproc
    policy = group.restart_policy
    restarts = 0
    attempts = itertools.count()
    with stopping_on_signals(group):
        while True:
            outcome = group.run(nproc, next(attempts), min_ranks)
            if isinstance(outcome, Success):
                return outcome.code
            if isinstance(outcome, BadInput):
                _discard_output(group, outcome)
                raise outcome.input_error
            if group.stop_signal == signal.SIGINT and _is_interrupted(group, outcome):
                raise KeyboardInterrupt
            may_shrink = nproc > min_nproc and policy.is_repeated_failure(outcome.rank)
            is_permanent = policy.is_permanent(outcome)
            action = decide_on_end(
                outcome, bool(group.stop_signal), is_permanent, may_shrink, max_restarts - restarts
            )
            if action is EndAction.STOP:
                return STOPPED
            policy.record_failure(outcome)
            if action is EndAction.SHRINK:
                nproc -= 1
                restarts = 0
                twice = f"rank {outcome.rank} failed twice within a minute"
                print_message(f"{twice}: continuing with {nproc} ranks")
            elif action is EndAction.RESTART:
                restarts += 1
                _report_restart(policy.has_steps, f"{restarts} of {max_restarts}")
            else:
                _report_given_up(action, max_restarts)
                return record_failed_end(outcome, group.stop_signal)


def _is_interrupted(group: LocalGroup, failure: Failure) -> bool:
    """Return whether ranks that were asked to stop have ended without saving anything."""
    if isinstance(failure, Raised):
        return group.spec.is_script or failure.error.name == "KeyboardInterrupt"
    return group.spec.is_script or was_stopped(failure)


def _report_restart(has_steps: bool, count: str) -> None:
    start = " from the last snapshot" if has_steps else ""
    print_message(f"restarting all ranks{start} ({count} restarts)")


def _report_given_up(action: EndAction, max_restarts: int) -> None:
    if action is EndAction.GIVE_UP and max_restarts:
        hint = f"HINT: --max-restarts {2 * max_restarts}"
        print_message(f"given up after {max_restarts} restarts. {hint}")


def _discard_output(group: LocalGroup, refused: BadInput) -> None:
    """Discard the ranks' output if they were refused before they opened the run directory."""
    if refused.error.step is None:
        group.spec.output.discard()


def record_failed_end(failure: Failure | None, stop_signal: int = 0) -> int:
    """Record for the script of a batch job whether a signal or the storage caused the failure.

    Args:
        failure: The last failure, if it was on this node.
        stop_signal: The signal that asked the ranks to stop; 0 if there was none.

    Returns:
        The exit code of a failed run, 1.
    """
    if stop_signal == signal.SIGTERM and not isinstance(failure, Raised):
        write_end(TERMINATED)
    elif isinstance(failure, Killed) and failure.signal_number == signal.SIGKILL:
        write_end(KILLED)
    elif isinstance(failure, Raised) and failure.error.kind is ErrorKind.STORAGE:
        write_end(STORAGE_FAILED)
    return FAILED


@contextmanager
def stopping_on_signals(group: LocalGroup) -> Iterator[None]:
    """Hand signals to the ranks in the block, and close the group at its end."""
    forwarded = FORWARDED_SIGNALS if group.spec.is_script else ()
    with (
        handle_signals(forwarded, group.forward_signal),
        handle_signals(drop_ignored_hangup(group.spec.stop_signals), group.handle_stop_signal),
        closing(group),
    ):
        yield
