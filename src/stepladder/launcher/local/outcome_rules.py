"""Determines how a group of ranks ended, from all the evidence at its end.

The rules are tried in the order of `RULES`, from the strongest evidence to the weakest. Each is a
pure function, so that each case is a row of a table in its test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stepladder.core.errors import STOPPED, is_failure
from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.local.outcome import (
    BadInput,
    Exited,
    Killed,
    Mismatched,
    Outcome,
    Raised,
    Stalled,
    Success,
    Unrecoverable,
    signal_name,
)
from stepladder.rank.error_record import KINDS_OF_MISMATCH, ErrorKind, RankError

STOP_TIMED_OUT = "asked to stop, the ranks did not reach the end of a step in time, and were ended"


@dataclass(frozen=True)
class Evidence:
    """All that is known of a group when it has ended.

    Args:
        exit_codes: The exit code of each rank, in rank order; None for a rank that had not ended.
        errors: The errors that ranks have recorded.
        explanation: Why the ranks made no progress, if that may have caused the end.
        was_explained_first: Whether the ranks had made no progress for so long that this was
            explained before the first of them failed.
        mismatch: The first collective that two ranks called differently, if there is one.
        is_out_of_memory: Whether the kernel killed a process for lack of memory while the group
            ran.
        stop_signal: The signal that asked a script to stop; 0 if there was none. Always 0 for a
            job: it handles the signal, and a script may not.
    """

    exit_codes: Mapping[int, int | None]
    errors: Sequence[RankError] = ()
    explanation: Explanation | None = None
    was_explained_first: bool = False
    mismatch: Explanation | None = None
    is_out_of_memory: bool = False
    stop_signal: int = 0

    @property
    def failed_codes(self) -> dict[int, int]:
        """The exit codes of the ranks that failed."""
        return {
            rank: code
            for rank, code in self.exit_codes.items()
            if code is not None and is_failure(code)
        }


Rule = Callable[[Evidence], Outcome | None]


def determine_outcome(evidence: Evidence) -> Outcome:
    """Return how the group ended: the result of the first rule that applies."""
    for rule in RULES:
        outcome = rule(evidence)
        if outcome is not None:
            return outcome
    # No rank has failed, but some did not end in time.
    return Stalled(None, STOP_TIMED_OUT)


def _find_success(evidence: Evidence) -> Outcome | None:
    """Return a success if all ranks have finished, or have stopped when they were asked to."""
    codes = evidence.exit_codes.values()
    if evidence.failed_codes or evidence.explanation is not None:
        return None
    if STOPPED in codes:
        return Success(STOPPED)
    if None in codes:
        return None
    return Success()


def _find_bad_input(evidence: Evidence) -> Outcome | None:
    """Return the bad input that a rank has found: all other failures are its consequence."""
    for error in evidence.errors:
        if error.kind is ErrorKind.BAD_INPUT:
            return BadInput(error)
    return None


def _find_stop_signal(evidence: Evidence) -> Outcome | None:
    """Return the signal that asked a script to stop, after which its ranks failed."""
    if not evidence.stop_signal:
        return None
    return Stalled(None, f"stopped by {signal_name(evidence.stop_signal)}")


def _find_early_stall(evidence: Evidence) -> Outcome | None:
    """Return the stall, if it came before any rank failed.

    The ranks that waited then failed because they waited in vain, so their errors do not tell the
    cause. If the rank that they waited for has failed by itself, its own failure is the cause, and
    a later rule returns it. If no rank stands out, as when the network is broken, the errors are
    all that is known.
    """
    if not evidence.was_explained_first or evidence.explanation is None:
        return None
    if evidence.explanation.rank is None and evidence.errors:
        return _find_exception(evidence) or _find_lost_peer(evidence)
    lost_a_peer = {error.rank for error in evidence.errors if error.is_consequence}
    failed_by_themselves = evidence.failed_codes.keys() - lost_a_peer
    if evidence.explanation.rank in failed_by_themselves:
        return None
    return _find_stall(evidence)


def _find_exception(evidence: Evidence) -> Outcome | None:
    """Return the earliest exception that no other rank caused."""
    was_killed = any(code < 0 for code in evidence.failed_codes.values())
    kinds_of_later_rules = {ErrorKind.SYS_EXIT}
    if was_killed:  # the others may have failed to connect because the killed rank did not answer
        kinds_of_later_rules.add(ErrorKind.NOT_CONNECTED)
    causes = [
        error
        for error in evidence.errors
        if not error.is_consequence and error.kind not in kinds_of_later_rules
    ]
    if not causes:
        return None
    first = min(causes, key=lambda error: error.time)
    if first.kind in KINDS_OF_MISMATCH:  # the same rank's view in each run
        first = min(
            (error for error in causes if error.kind is first.kind), key=lambda error: error.rank
        )
    return Raised(first)


def _find_early_end(evidence: Evidence) -> Outcome | None:
    """Return the end of a rank that finished while the others still needed it."""
    explanation = evidence.explanation
    if explanation is None or not explanation.left_early:
        return None
    return Stalled(explanation.rank, explanation.with_cause)


def _find_mismatch(evidence: Evidence) -> Outcome | None:
    """Return that ranks called different collectives, or the abort that is its usual sign.

    gloo aborts such a rank without a message, so the recorded calls explain more than the signal.
    """
    if evidence.mismatch is not None:
        return Mismatched(evidence.mismatch.rank, evidence.mismatch.with_cause)
    # The calls that differ were not recorded: only the abort in a collective is known.
    explanation = evidence.explanation
    if explanation is None or not explanation.is_abort:
        return None
    return Stalled(explanation.rank, explanation.with_cause)


def _find_signal(evidence: Evidence) -> Outcome | None:
    """Return the signal that has ended a rank."""
    for rank, code in evidence.failed_codes.items():
        if code < 0:
            return Killed(rank, -code, evidence.is_out_of_memory)
    return None


def _find_stall(evidence: Evidence) -> Outcome | None:
    """Return why the ranks made no progress."""
    if evidence.explanation is None:
        return None
    return Stalled(evidence.explanation.rank, evidence.explanation.sentence)


def _find_exit_code(evidence: Evidence) -> Outcome | None:
    """Return the exit code of a rank that called sys.exit(), or that recorded no error."""
    kinds = {error.rank: error.kind for error in evidence.errors}
    for rank, code in evidence.failed_codes.items():
        if kinds.get(rank, ErrorKind.SYS_EXIT) is ErrorKind.SYS_EXIT:
            return Exited(rank, code, is_sys_exit=rank in kinds)
    return None


def _find_lost_state(evidence: Evidence) -> Outcome | None:
    """Return the earliest error of a rank that found the training state lost with other ranks.

    Later errors come from ranks that were about to join, and only say that the others have ended.
    """
    errors = [error for error in evidence.errors if error.kind is ErrorKind.STATE_LOST]
    if not errors:
        return None
    first = min(errors, key=lambda error: error.time)
    return Unrecoverable(first.text)


def _find_lost_peer(evidence: Evidence) -> Outcome | None:
    """Return the loss of a peer, which is the only evidence if the cause is on another node."""
    if not evidence.errors:
        return None
    return Raised(evidence.errors[0])


RULES: tuple[Rule, ...] = (
    _find_success,
    _find_bad_input,
    _find_stop_signal,
    _find_early_stall,
    _find_exception,
    _find_early_end,
    _find_mismatch,
    _find_signal,
    _find_stall,
    _find_exit_code,
    _find_lost_state,
    _find_lost_peer,
)
