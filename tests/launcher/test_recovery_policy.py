"""What the launcher of one node does after a loss, as tables: pure, so all that may happen is tried
in milliseconds.
"""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest

from stepladder.launcher.local.outcome import Failure, Killed, Stalled
from stepladder.launcher.local.recovery_policy import (
    EndAction,
    FailureAction,
    RecoveryAction,
    RecoveryView,
    decide,
    decide_on_end,
    decide_on_failure,
)

TRAINING: dict[str, Any] = {"training": {0, 1}}
LOST: dict[str, Any] = {"training": {0, 1}, "has_failed": True, "loss_reported": True}
SENT: dict[str, Any] = {**LOST, "loss_sent": True}
JOIN: dict[str, Any] = {"training": {0, 1}, "joining": {2}, "waiting": {2}}
ASKED: dict[str, Any] = {**JOIN, "join_requested": True, "regroup_requested": True}
REFUSED: dict[str, Any] = {"training": {0, 1}, "is_refused": True}
DONE: dict[str, Any] = {"ranks_finished": True}

STEPS: list[tuple[str, dict[str, Any], RecoveryAction]] = [
    ("at work", TRAINING, RecoveryAction.WAIT),
    ("a rank fails", {**TRAINING, "has_failed": True}, RecoveryAction.REPORT_LOSS),
    ("a rank has left a broken group", {**TRAINING, "waiting": {1}}, RecoveryAction.REPORT_LOSS),
    ("the other nodes know of a loss", LOST, RecoveryAction.SEND_LOSS),
    ("the ranks here know of it", SENT, RecoveryAction.WAIT),
    ("one of them has left its group", {**SENT, "waiting": {1}}, RecoveryAction.WAIT),
    ("all of them have", {**SENT, "waiting": {0, 1}}, RecoveryAction.VOTE),
    ("a node without ranks votes too", {**SENT, "training": set()}, RecoveryAction.VOTE),
    ("a replacement starts", {**TRAINING, "joining": {2}}, RecoveryAction.WAIT),
    ("it is ready", JOIN, RecoveryAction.REQUEST_JOIN),
    (
        "the other nodes know of it",
        {**JOIN, "join_requested": True},
        RecoveryAction.REQUEST_REGROUP,
    ),
    ("the ranks finish their step", ASKED, RecoveryAction.WAIT),
    ("one has left its group for it", {**ASKED, "waiting": {1, 2}}, RecoveryAction.WAIT),
    ("all have", {**ASKED, "waiting": {0, 1, 2}}, RecoveryAction.VOTE),
    ("a rank fails meanwhile", {**ASKED, "has_failed": True}, RecoveryAction.REPORT_LOSS),
    ("... and the ranks know of it", {**ASKED, **SENT, "waiting": {0, 1, 2}}, RecoveryAction.VOTE),
    ("a node joins", {**TRAINING, "join_requested": True}, RecoveryAction.REQUEST_REGROUP),
    ("another node has lost a rank", {**TRAINING, "loss_reported": True}, RecoveryAction.SEND_LOSS),
    ("there is no next group", REFUSED, RecoveryAction.WAIT),
    ("... and ranks wait for it", {**REFUSED, "waiting": {0}}, RecoveryAction.REFUSE),
    ("... and no rank trains", {"is_refused": True}, RecoveryAction.END),
    ("... and a rank was to join", {"is_refused": True, "joining": {2}}, RecoveryAction.END),
    (
        "... and it waits",
        {"is_refused": True, "joining": {2}, "waiting": {2}},
        RecoveryAction.REFUSE,
    ),
    ("all have finished", DONE, RecoveryAction.WAIT),
    ("... and a rank was to join", {**DONE, "joining": {2}}, RecoveryAction.KILL_JOINING),
    ("... and it waits", {**DONE, "joining": {2}, "waiting": {2}}, RecoveryAction.KILL_JOINING),
    ("one has finished, one trains", {**DONE, "training": {1}}, RecoveryAction.WAIT),
    (
        "one has finished, the last has failed",
        {**DONE, "has_failed": True},
        RecoveryAction.REPORT_LOSS,
    ),
]


@pytest.mark.parametrize(
    ("fields", "action"), [row[1:] for row in STEPS], ids=[row[0] for row in STEPS]
)
def test_the_next_step_of_a_recovery(fields: dict[str, Any], action: RecoveryAction) -> None:
    assert decide(RecoveryView(**fields)) is action


def test_whatever_a_launcher_sees() -> None:
    """What holds in each of the 18,432 cases with two ranks that train and one that joins."""
    names = list(RecoveryView.__dataclass_fields__)
    ranks: list[list[set[int]]] = [[set(), {0}, {0, 1}], [set(), {2}]]
    waiting: list[set[int]] = [
        set(numbers) for size in range(4) for numbers in itertools.combinations((0, 1, 2), size)
    ]
    flags = itertools.product([False, True], repeat=len(names) - 3)
    for values in itertools.product(*ranks, waiting, flags):
        view = RecoveryView(*values[:3], *values[3])  # type: ignore[misc, arg-type]
        action = decide(view)
        if action is RecoveryAction.VOTE:
            assert view.training <= view.waiting, "a rank in a group needs no other one"
            assert view.loss_reported or view.join_requested
        if action in (RecoveryAction.SEND_LOSS, RecoveryAction.REQUEST_REGROUP):
            assert not view.is_refused, "the ranks are told of no group that does not come"
        if view.is_refused:
            assert action in (RecoveryAction.REFUSE, RecoveryAction.WAIT, RecoveryAction.END)
            assert (action is RecoveryAction.REFUSE) == bool(view.waiting), "nobody waits in vain"
        if action is RecoveryAction.END:
            assert not view.training, "ranks that train are not ended"
        if action is RecoveryAction.KILL_JOINING:
            assert not view.training and not view.has_failed


GROUPED: dict[str, Any] = {"alive": {0, 2}, "grouped": {0, 1, 2}}
FAILURES: list[tuple[str, dict[str, Any], FailureAction]] = [
    ("while the others train", GROUPED, FailureAction.RECOVER),
    ("before its first group", {**GROUPED, "grouped": {0, 2}}, FailureAction.END),
    ("before another one's", {**GROUPED, "grouped": {0, 1}}, FailureAction.END),
    ("as the last one", {"grouped": {1}}, FailureAction.END),
    ("as the last one of its node", {"grouped": {1}, "peers_train": True}, FailureAction.RECOVER),
    ("beside one that joins", {"alive": {3}, "joining": {3}, "grouped": {1}}, FailureAction.END),
    (
        "beside one that trains and one that joins",
        {"alive": {0, 3}, "joining": {3}, "grouped": {0, 1}},
        FailureAction.RECOVER,
    ),
    ("that all have", {**GROUPED, "affects_all_ranks": True}, FailureAction.END),
    (
        "where nobody has the state",
        {**GROUPED, "affects_all_ranks": True, "has_lost_state": True},
        FailureAction.REFUSE,
    ),
    ("without a next group", {**GROUPED, "is_refused": True}, FailureAction.END),
    ("while it joins", {**GROUPED, "joining": {1}}, FailureAction.ABANDON),
    (
        "while it joins, in any way",
        {**GROUPED, "joining": {1}, "affects_all_ranks": True, "has_lost_state": True},
        FailureAction.ABANDON,
    ),
    (
        "while it joins a group that does not come",
        {**GROUPED, "joining": {1}, "is_refused": True},
        FailureAction.END,
    ),
    ("of one that was given up", {**GROUPED, "abandoned": {1}}, FailureAction.IGNORE),
    (
        "of one that was given up, without a next group",
        {**GROUPED, "abandoned": {1}, "is_refused": True, "has_lost_state": True},
        FailureAction.IGNORE,
    ),
]


@pytest.mark.parametrize(
    ("fields", "action"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES]
)
def test_a_failure(fields: dict[str, Any], action: FailureAction) -> None:
    assert decide_on_failure(1, **fields) is action


STALL = Stalled(None, "a rank has not come")
TERMINATED = Killed(0, signal.SIGTERM)
ENDS: list[tuple[str, Failure, dict[str, Any], EndAction]] = [
    ("a fault", STALL, {"restarts_left": 1}, EndAction.RESTART),
    ("a fault too many", STALL, {}, EndAction.GIVE_UP),
    ("a bug", STALL, {"restarts_left": 1, "is_permanent": True}, EndAction.FAIL),
    ("a bug of a rank that fails again", STALL, {"may_shrink": True, "is_permanent": True},
     EndAction.FAIL),
    ("a rank that fails again", STALL, {"may_shrink": True}, EndAction.SHRINK),
    ("ended before the first step", TERMINATED, {"is_stopping": True}, EndAction.STOP),
    ("as its terminal closes", Killed(0, signal.SIGHUP), {"is_stopping": True}, EndAction.STOP),
    ("killed as it stopped", Killed(0, signal.SIGKILL), {"is_stopping": True}, EndAction.FAIL),
    ("failed as it stopped", STALL, {"is_stopping": True, "restarts_left": 1}, EndAction.FAIL),
    ("ended by a stranger", TERMINATED, {"restarts_left": 1}, EndAction.RESTART),
]  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "fields", "action"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS]
)
def test_the_end_of_an_attempt(failure: Failure, fields: dict[str, Any], action: EndAction) -> None:
    assert decide_on_end(failure, **fields) is action
