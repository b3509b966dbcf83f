"""The rules that tell how a group of ranks has ended, on what may be known of one."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from stepladder.core.errors import BAD_INPUT, DONE, STOPPED, InputError
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
)
from stepladder.launcher.local.outcome_rules import STOP_TIMED_OUT, Evidence, determine_outcome
from stepladder.rank.error_record import ErrorKind, RankError

KILL = -signal.SIGKILL
TERM = -signal.SIGTERM
ABRT = -signal.SIGABRT


def error(
    rank: int, kind: ErrorKind = ErrorKind.OTHER, time: float = 0.0, step: int | None = 7
) -> RankError:
    return RankError(
        rank, "KeyError", "lost\nsecond line", "Traceback ...", step, time, "fix it", kind
    )


BUG = error(1, time=5)
LATER_BUG = error(0, time=6)
LOST = error(0, ErrorKind.PEER_LOST)
SILENT = error(0, ErrorKind.PEER_SILENT)
BAD = error(1, ErrorKind.BAD_INPUT, time=9)
ORPHAN = error(2, ErrorKind.STATE_LOST, step=None)
JOINING = replace(
    error(0, ErrorKind.STATE_LOST, time=7, step=None), text="those that it was to join have gone"
)
UNMET = error(0, ErrorKind.NOT_CONNECTED, step=None)
WAITED = Explanation(1, "rank 1 has not come", "an endless loop", ())
CRASHED = Explanation(1, "rank 1 was aborted", "other shapes", (), is_abort=True)
EARLY = Explanation(1, "rank 1 ended well", "fewer batches", (), left_early=True)
FIRST: dict[str, Any] = {"explanation": WAITED, "was_explained_first": True}
UNLIKE = Explanation(0, "rank 0 passes 7", "other shapes", ())

# codes by rank, what else is known, and what that means
ENDS: list[tuple[dict[int, int | None], dict[str, Any], Outcome]] = [
    ({0: DONE, 1: DONE}, {}, Success(DONE)),
    ({0: STOPPED, 1: STOPPED}, {}, Success(STOPPED)),
    ({0: STOPPED, 1: DONE}, {}, Success(STOPPED)),
    ({0: STOPPED, 1: None}, {}, Success(STOPPED)),
    ({0: None, 1: DONE}, {}, Stalled(None, STOP_TIMED_OUT)),
    # Bad input is found by all: whatever else has happened came of it.
    ({0: 1, 1: BAD_INPUT}, {"errors": [LATER_BUG, BAD], **FIRST}, BadInput(BAD)),
    # Who kept the others waiting, where it was known before anybody gave up.
    ({0: 1, 1: None}, {"errors": [BUG], **FIRST}, Stalled(1, WAITED.sentence)),
    ({0: None, 1: None}, {**FIRST}, Stalled(1, WAITED.sentence)),
    # ... but the error, or the end, of the one that they waited for says more.
    ({0: 1, 1: 1}, {"errors": [BUG, LOST], **FIRST}, Raised(BUG)),
    ({0: 1, 1: KILL}, {"errors": [LOST], **FIRST}, Killed(1, signal.SIGKILL)),
    # A rank that left others, which then lost it.
    ({0: 1, 1: DONE}, {"errors": [LOST], "explanation": EARLY}, Stalled(1, EARLY.with_cause)),
    # The earliest error that is nobody else's doing.
    ({0: 1, 1: 1}, {"errors": [LATER_BUG, BUG], "explanation": WAITED}, Raised(BUG)),
    ({0: 1, 1: 1}, {"errors": [LOST, BUG], "mismatch": UNLIKE}, Raised(BUG)),
    ({0: 1, 1: None}, {"errors": [LATER_BUG]}, Raised(LATER_BUG)),
    # What gloo makes of collectives that do not fit: a lost peer, an abort.
    ({0: 1, 1: ABRT}, {"mismatch": UNLIKE, "explanation": CRASHED},
     Mismatched(0, UNLIKE.with_cause)),
    ({0: 1, 1: ABRT}, {"errors": [LOST], "explanation": CRASHED}, Stalled(1, CRASHED.with_cause)),
    ({0: 1, 1: ABRT}, {"errors": [LOST], "explanation": WAITED}, Killed(1, signal.SIGABRT)),
    # A signal from outside is the cause of lost peers, and of waiting in vain.
    ({0: 1, 1: KILL}, {"errors": [LOST]}, Killed(1, signal.SIGKILL)),
    ({0: 1, 1: KILL}, {"errors": [SILENT], "explanation": WAITED}, Killed(1, signal.SIGKILL)),
    ({0: 1, 1: KILL}, {"errors": [UNMET]}, Killed(1, signal.SIGKILL)),
    ({0: 1, 1: None}, {"errors": [UNMET]}, Raised(UNMET)),
    ({0: KILL, 1: KILL}, {"is_out_of_memory": True}, Killed(0, signal.SIGKILL, True)),
    ({2: 3, 3: TERM}, {}, Killed(3, signal.SIGTERM)),
    # Nobody was killed: who was waited for, else who ended without output, else the loss itself.
    ({0: 1, 1: None}, {"errors": [SILENT], "explanation": WAITED}, Stalled(1, WAITED.sentence)),
    ({0: 1, 1: 3}, {"errors": [SILENT], "explanation": WAITED}, Stalled(1, WAITED.sentence)),
    ({0: 1, 1: 3}, {"errors": [LOST]}, Exited(1, 3)),
    ({0: 1, 1: None}, {"errors": [LOST]}, Raised(LOST)),
    # What was lost with others, before: it says more than another rank's lost peer, and less than
    # one's own end.
    ({0: 1, 1: None, 2: 1}, {"errors": [LOST, ORPHAN]}, Unrecoverable(ORPHAN.text)),
    ({0: 1, 1: None, 2: 1}, {"errors": [JOINING, ORPHAN]}, Unrecoverable(ORPHAN.text)),
    ({0: 1, 1: KILL, 2: 1}, {"errors": [LOST, ORPHAN]}, Killed(1, signal.SIGKILL)),
    ({0: 1, 1: 1, 2: 1}, {"errors": [LOST, BUG, ORPHAN]}, Raised(BUG)),
    ({0: 1, 1: 4}, {}, Exited(0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("codes", "known", "expected"), ENDS)
def test_how_a_group_ended(
    codes: dict[int, int | None], known: dict[str, Any], expected: Outcome
) -> None:
    assert determine_outcome(Evidence(codes, **known)) == expected


@pytest.mark.parametrize(
    ("codes", "known", "expected"),
    [
        ({0: DONE, 1: DONE}, {}, Success(DONE)),  # a script that made use of the time it had
        ({0: STOPPED, 1: STOPPED}, {}, Success(STOPPED)),
        ({0: 1, 1: BAD_INPUT}, {"errors": [BAD]}, BadInput(BAD)),
        ({0: TERM, 1: None}, {}, Stalled(None, "stopped by SIGTERM")),
        ({0: None, 1: None}, {}, Stalled(None, "stopped by SIGTERM")),
        ({0: 1, 1: 1}, {"errors": [LOST, BUG]}, Stalled(None, "stopped by SIGTERM")),
    ],
)
def test_a_script_that_was_asked_to_stop(
    codes: dict[int, int | None], known: dict[str, Any], expected: Outcome
) -> None:
    assert determine_outcome(Evidence(codes, stop_signal=signal.SIGTERM, **known)) == expected


def test_what_a_failure_says() -> None:
    assert Raised(BUG).text == "rank 1 failed at step 7: KeyError: lost"
    assert Raised(error(2, step=None)).text == "rank 2 failed: KeyError: lost"
    assert Raised(error(1, ErrorKind.CORRUPT)).text == "lost\nsecond line"
    assert Killed(1, signal.SIGKILL).text == "rank 1 was killed by SIGKILL"
    assert Killed(1, 41).text == "rank 1 was killed by signal 41"
    assert Exited(1, 3).text == "rank 1 ended with exit code 3"
    assert (
        "kernel" in Killed(1, signal.SIGKILL, True).cause
        and "kill -9" in Killed(1, signal.SIGKILL).cause
    )
    assert "an import" in Raised(error(0, ErrorKind.IMPORT)).cause and Exited(1, 3).cause == ""


def test_what_a_launcher_does_about_it() -> None:
    input_error = BadInput(BAD).input_error
    assert isinstance(input_error, InputError)
    assert input_error.problem == BAD.text
    assert input_error.hint == "fix it"
