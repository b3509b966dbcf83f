"""What an agent does next, as a table: pure, so all that may happen on several nodes is tried in
milliseconds.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from stepladder.core.errors import BAD_INPUT, DONE, FAILED, STOPPED
from stepladder.launcher.nodes.policy import (
    GIVEN_UP,
    STOP_REASON_TIMEOUT_S,
    Continue,
    End,
    Restart,
    Status,
    Stop,
    View,
    decide,
    peers_end_timeout,
)

ON_ALL = "ended on all nodes"
ENDED = "the run has ended on the other nodes"
UNSTARTED = "stopped before its ranks had started"
SILENT = "node 2 has been silent for 15 s: restarting all without it"
JOINING = "other nodes are waiting: ranks stop with a snapshot, and all go on together"
ABSENT = Status.ABSENT
RUNNING = Status.RUNNING
STOPPED_WELL = Status.STOPPED
PEER_LOST = Status.PEER_LOST

JOB: list[tuple[str, Status, dict[str, Any], Continue | Stop | Restart | End]] = [
    ("waiting for nodes", ABSENT, {}, Continue()),
    ("a signal while waiting", ABSENT, {"stop_asked": True}, End(STOPPED, UNSTARTED)),
    ("all has ended well while waiting", ABSENT, {"published_end": End(DONE)}, End(DONE, ENDED)),
    ("all was stopped while waiting", ABSENT, {"published_end": End(STOPPED)}, End(STOPPED, ENDED)),
    ("first word counts", ABSENT, {"published_end": End(FAILED, "why"), "stop_asked": True}, End(FAILED, "why")),
    ("at work", RUNNING, {}, Continue()),
    ("a node joins", RUNNING, {"nodes_waiting": True}, Stop(JOINING)),
    ("until all have stopped", RUNNING, {"nodes_waiting": True, "stopping": True}, Continue()),
    ("the node that wanted to join has gone", RUNNING, {"stopping": True}, Continue()),
    ("a rank elsewhere fails before", RUNNING, {"nodes_waiting": True, "peers_failed": True}, Restart()),
    ("a rank elsewhere fails meanwhile", RUNNING, {"stopping": True, "peers_failed": True}, Restart()),
    ("a signal and a node that joins", RUNNING, {"nodes_waiting": True, "stop_asked": True}, Continue()),
    ("others have ended well, ours finish", RUNNING, {"published_end": End(DONE)}, Continue()),
    ("others were stopped, ours finish", RUNNING, {"published_end": End(STOPPED)}, Continue()),
    ("others have failed", RUNNING, {"published_end": End(FAILED, "a bug")}, End(FAILED, "a bug")),
    ("others found bad input", RUNNING, {"published_end": End(BAD_INPUT, "what")}, End(BAD_INPUT, "what")),
    ("a node falls silent", RUNNING, {"silent_node": 2, "restarts_left": 1}, Restart(SILENT, counted=True)),
    ("silent once too often", RUNNING, {"silent_node": 2}, End(FAILED, GIVEN_UP)),
    ("silent while one joins", RUNNING, {"silent_node": 2, "stopping": True}, Restart(SILENT)),
    ("silent after a signal", RUNNING, {"silent_node": 2, "stop_asked": True}, End(STOPPED, UNSTARTED)),
    ("done", Status.DONE, {}, End(DONE)),
    ("done when the signal came", Status.DONE, {"stop_asked": True}, End(DONE)),
    ("done, but others have failed", Status.DONE, {"published_end": End(FAILED)}, End(FAILED, ENDED)),
    ("stopped by a signal", STOPPED_WELL, {"stop_asked": True}, End(STOPPED)),
    ("stopped for the time limit", STOPPED_WELL, {"at_time_limit": True}, End(STOPPED)),
    ("stopped by a signal elsewhere", STOPPED_WELL, {"published_end": End(STOPPED)}, End(STOPPED)),
    ("stopped, and others at the end", STOPPED_WELL, {"published_end": End(DONE)}, End(DONE)),
    ("stopped for a node that joins", STOPPED_WELL, {"stopping": True}, Restart()),
    ("stopped from elsewhere for it", STOPPED_WELL, {"nodes_waiting": True}, Restart()),
    ("stopped, why is not known yet", STOPPED_WELL, {"seconds_ended": STOP_REASON_TIMEOUT_S - 0.1}, Continue()),
    (
        "stopped, and others have gone on", STOPPED_WELL,
        {"seconds_ended": STOP_REASON_TIMEOUT_S, "restarts_left": 1}, Restart(counted=True),
    ),
    ("outside its steps", Status.TERMINATED, {"stop_asked": True}, End(STOPPED, "stopped by the signal itself")),
    ("bad input", Status.BAD_INPUT, {"restarts_left": 3}, End(BAD_INPUT)),
    ("bad input, found by others first", Status.BAD_INPUT, {"published_end": End(BAD_INPUT, "what")}, End(BAD_INPUT)),
    ("another node's rank was lost", PEER_LOST, {"restarts_left": 3}, Restart(counted=True)),
    ("lost once too often", PEER_LOST, {}, End(FAILED, GIVEN_UP)),
    ("lost, as Slurm ends all", PEER_LOST, {"stop_asked": True, "restarts_left": 3}, End(STOPPED, UNSTARTED)),
    ("lost, as it had done its work", PEER_LOST, {"published_end": End(DONE), "restarts_left": 3}, End(DONE, ENDED)),
    ("a fault", Status.FAULT, {"restarts_left": 1}, Restart(counted=True)),
    ("a fault too many", Status.FAULT, {}, End(FAILED, GIVEN_UP)),
    ("a fault of ranks that were to restart", Status.FAULT, {"stopping": True}, Restart()),
    ("a fault after a signal", Status.FAULT, {"stop_asked": True, "restarts_left": 1}, End(FAILED, ON_ALL)),
    ("a bug", Status.BUG, {"restarts_left": 3}, End(FAILED, ON_ALL)),
]  # fmt: skip
COME_OR_GONE = "other nodes have come or gone: restarting all ranks"
SCRIPT: list[tuple[str, Status, dict[str, Any], Continue | Stop | Restart | End]] = [
    ("a signal while waiting", ABSENT, {"stop_asked": True}, End(FAILED, UNSTARTED)),
    ("at work", RUNNING, {}, Continue()),
    ("a signal at work", RUNNING, {"stop_asked": True, "nodes_waiting": True}, Continue()),
    (
        "a node joins, and nothing can be saved",
        RUNNING,
        {"nodes_waiting": True},
        Restart(COME_OR_GONE),
    ),
    (
        "so too where ranks have failed",
        RUNNING,
        {"nodes_waiting": True, "peers_failed": True},
        Restart(COME_OR_GONE),
    ),
    ("done", Status.DONE, {}, End(DONE)),
    ("ended with 75 by itself", STOPPED_WELL, {"nodes_waiting": True}, End(STOPPED)),
    ("bad input", Status.BAD_INPUT, {}, End(BAD_INPUT)),
    ("a fault", Status.FAULT, {"restarts_left": 1}, Restart(counted=True)),
    ("a fault too many was shown, and that is all", Status.FAULT, {}, End(FAILED)),
    ("a fault after a signal", Status.FAULT, {"stop_asked": True, "restarts_left": 1}, End(FAILED)),
    ("another node's rank was lost", PEER_LOST, {"restarts_left": 1}, Restart(counted=True)),
    ("lost after a signal", PEER_LOST, {"stop_asked": True, "restarts_left": 1}, End(FAILED)),
]


@pytest.mark.parametrize(
    ("ranks", "fields", "next_"), [row[1:] for row in JOB], ids=[row[0] for row in JOB]
)
def test_a_job(ranks: Status, fields: dict[str, Any], next_: object) -> None:
    assert decide(View(ranks, **fields)) == next_


@pytest.mark.parametrize(
    ("ranks", "fields", "next_"), [row[1:] for row in SCRIPT], ids=[row[0] for row in SCRIPT]
)
def test_a_script(ranks: Status, fields: dict[str, Any], next_: object) -> None:
    assert decide(View(ranks, can_resume=False, **fields)) == next_


def views() -> list[View]:
    """All that an agent may see, but for texts and numbers that decide nothing."""
    flags = (
        "can_resume",
        "stop_asked",
        "nodes_waiting",
        "stopping",
        "at_time_limit",
        "peers_failed",
    )
    published = (None, *(End(code) for code in (DONE, FAILED, BAD_INPUT, STOPPED)))
    return [
        View(
            ranks,
            published_end=end,
            silent_node=silent,
            restarts_left=restarts,
            **dict(zip(flags, given, strict=True)),
        )
        for ranks, end, silent, restarts in itertools.product(Status, published, (None, 0), (0, 2))
        for given in itertools.product((False, True), repeat=len(flags))
    ]


def test_whatever_an_agent_sees() -> None:
    """What holds in each of the 11,520 cases."""
    for view in views():
        decision = decide(view)
        if isinstance(decision, Restart):
            assert not view.stop_asked, "nothing is started again once a signal has come"
            assert not decision.counted or view.restarts_left, "no more restarts than are allowed"
            assert view.ranks not in (
                Status.DONE,
                Status.BAD_INPUT,
                Status.BUG,
                Status.TERMINATED,
                Status.ABSENT,
            )
        if isinstance(decision, Stop):
            assert view.ranks is Status.RUNNING and view.can_resume and view.nodes_waiting
        if isinstance(decision, Continue):
            assert view.ranks in (Status.ABSENT, Status.RUNNING, Status.STOPPED), (
                "what has ended is never waited for"
            )
        if view.published_end is not None and view.published_end.code in (FAILED, BAD_INPUT):
            assert isinstance(decision, End), "a failure elsewhere ends all"
        if isinstance(decision, End) and decision.code == DONE:
            assert view.ranks is Status.DONE or view.published_end == End(DONE), (
                "only who has done the work says so"
            )


@pytest.mark.parametrize(
    ("can_resume", "stop_asked", "time_limited", "seconds"),
    [
        (True, False, False, 30),
        (True, True, False, 30),
        (True, True, True, 300),
        (True, False, True, 300),
        (False, False, False, 300),
        (False, True, False, 30),
        (False, True, True, 300),
    ],
)
def test_ranks_that_have_ended_well_wait_for_the_others(
    can_resume: bool, stop_asked: bool, time_limited: bool, seconds: float
) -> None:
    assert peers_end_timeout(can_resume, stop_asked, time_limited) == seconds
