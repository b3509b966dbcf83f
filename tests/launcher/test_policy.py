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
    SECONDS_TO_LEARN_WHY,
    End,
    Keep,
    Restart,
    Status,
    Stop,
    View,
    decide,
    patience,
)

ON_ALL = "ended on all nodes"
ENDED = "the run has ended on the other nodes"
UNSTARTED = "stopped before its ranks had started"
SILENT = "node 2 has been silent for 15 s: restarting all without it"
JOINING = "other nodes are waiting: ranks stop with a snapshot, and all go on together"
ABSENT, RUNNING, STOPPED_WELL, PEER_LOST = (
    Status.ABSENT,
    Status.RUNNING,
    Status.STOPPED,
    Status.PEER_LOST,
)

JOB: list[tuple[str, Status, dict[str, Any], Keep | Stop | Restart | End]] = [
    ("waiting for nodes", ABSENT, {}, Keep()),
    ("a signal while waiting", ABSENT, {"stop_asked": True}, End(STOPPED, UNSTARTED)),
    ("all has ended well while waiting", ABSENT, {"published": End(DONE)}, End(DONE, ENDED)),
    ("all was stopped while waiting", ABSENT, {"published": End(STOPPED)}, End(STOPPED, ENDED)),
    ("first word counts", ABSENT, {"published": End(FAILED, "why"), "stop_asked": True}, End(FAILED, "why")),
    ("at work", RUNNING, {}, Keep()),
    ("a node joins", RUNNING, {"waiting": True}, Stop(JOINING)),
    ("until all have stopped", RUNNING, {"waiting": True, "stopping": True}, Keep()),
    ("the node that wanted to join has gone", RUNNING, {"stopping": True}, Keep()),
    ("a rank elsewhere fails before", RUNNING, {"waiting": True, "broken": True}, Restart()),
    ("a rank elsewhere fails meanwhile", RUNNING, {"stopping": True, "broken": True}, Restart()),
    ("a signal and a node that joins", RUNNING, {"waiting": True, "stop_asked": True}, Keep()),
    ("others have ended well, ours finish", RUNNING, {"published": End(DONE)}, Keep()),
    ("others were stopped, ours finish", RUNNING, {"published": End(STOPPED)}, Keep()),
    ("others have failed", RUNNING, {"published": End(FAILED, "a bug")}, End(FAILED, "a bug")),
    ("others found bad input", RUNNING, {"published": End(BAD_INPUT, "what")}, End(BAD_INPUT, "what")),
    ("a node falls silent", RUNNING, {"silent": 2, "restarts_left": 1}, Restart(SILENT, counted=True)),
    ("silent once too often", RUNNING, {"silent": 2}, End(FAILED, GIVEN_UP)),
    ("silent while one joins", RUNNING, {"silent": 2, "stopping": True}, Restart(SILENT)),
    ("silent after a signal", RUNNING, {"silent": 2, "stop_asked": True}, End(STOPPED, UNSTARTED)),
    ("done", Status.DONE, {}, End(DONE)),
    ("done when the signal came", Status.DONE, {"stop_asked": True}, End(DONE)),
    ("done, but others have failed", Status.DONE, {"published": End(FAILED)}, End(FAILED, ENDED)),
    ("stopped by a signal", STOPPED_WELL, {"stop_asked": True}, End(STOPPED)),
    ("stopped for the time limit", STOPPED_WELL, {"late": True}, End(STOPPED)),
    ("stopped by a signal elsewhere", STOPPED_WELL, {"published": End(STOPPED)}, End(STOPPED)),
    ("stopped, and others at the end", STOPPED_WELL, {"published": End(DONE)}, End(DONE)),
    ("stopped for a node that joins", STOPPED_WELL, {"stopping": True}, Restart()),
    ("stopped from elsewhere for it", STOPPED_WELL, {"waiting": True}, Restart()),
    ("stopped, why is not known yet", STOPPED_WELL, {"seconds_ended": SECONDS_TO_LEARN_WHY - 0.1}, Keep()),
    (
        "stopped, and others have gone on", STOPPED_WELL,
        {"seconds_ended": SECONDS_TO_LEARN_WHY, "restarts_left": 1}, Restart(counted=True),
    ),
    ("outside its steps", Status.TERMINATED, {"stop_asked": True}, End(STOPPED, "stopped by the signal itself")),
    ("bad input", Status.BAD_INPUT, {"restarts_left": 3}, End(BAD_INPUT)),
    ("bad input, found by others first", Status.BAD_INPUT, {"published": End(BAD_INPUT, "what")}, End(BAD_INPUT)),
    ("another node's rank was lost", PEER_LOST, {"restarts_left": 3}, Restart(counted=True)),
    ("lost once too often", PEER_LOST, {}, End(FAILED, GIVEN_UP)),
    ("lost, as Slurm ends all", PEER_LOST, {"stop_asked": True, "restarts_left": 3}, End(STOPPED, UNSTARTED)),
    ("lost, as it had done its work", PEER_LOST, {"published": End(DONE), "restarts_left": 3}, End(DONE, ENDED)),
    ("a fault", Status.FAULT, {"restarts_left": 1}, Restart(counted=True)),
    ("a fault too many", Status.FAULT, {}, End(FAILED, GIVEN_UP)),
    ("a fault of ranks that were to restart", Status.FAULT, {"stopping": True}, Restart()),
    ("a fault after a signal", Status.FAULT, {"stop_asked": True, "restarts_left": 1}, End(FAILED, ON_ALL)),
    ("a bug", Status.BUG, {"restarts_left": 3}, End(FAILED, ON_ALL)),
]  # fmt: skip
COME_OR_GONE = "other nodes have come or gone: restarting all ranks"
SCRIPT: list[tuple[str, Status, dict[str, Any], Keep | Stop | Restart | End]] = [
    ("a signal while waiting", ABSENT, {"stop_asked": True}, End(FAILED)),
    ("at work", RUNNING, {}, Keep()),
    ("a signal at work", RUNNING, {"stop_asked": True, "waiting": True}, Keep()),
    ("a node joins, and nothing can be saved", RUNNING, {"waiting": True}, Restart(COME_OR_GONE)),
    (
        "so too where ranks have failed",
        RUNNING,
        {"waiting": True, "broken": True},
        Restart(COME_OR_GONE),
    ),
    ("done", Status.DONE, {}, End(DONE)),
    ("ended with 75 by itself", STOPPED_WELL, {"waiting": True}, End(STOPPED)),
    ("bad input", Status.BAD_INPUT, {}, End(BAD_INPUT)),
    ("a fault", Status.FAULT, {"restarts_left": 1}, Restart(counted=True)),
    ("a fault too many was shown, and that is all", Status.FAULT, {}, End(FAILED)),
    ("a fault after a signal", Status.FAULT, {"stop_asked": True, "restarts_left": 1}, End(FAILED)),
    ("another node's rank was lost", PEER_LOST, {"restarts_left": 1}, Restart(counted=True)),
    ("lost after a signal", PEER_LOST, {"stop_asked": True, "restarts_left": 1}, End(FAILED)),
]


@pytest.mark.parametrize(
    ("ranks", "seen", "next_"), [row[1:] for row in JOB], ids=[row[0] for row in JOB]
)
def test_a_job(ranks: Status, seen: dict[str, Any], next_: object) -> None:
    assert decide(View(ranks, **seen)) == next_


@pytest.mark.parametrize(
    ("ranks", "seen", "next_"), [row[1:] for row in SCRIPT], ids=[row[0] for row in SCRIPT]
)
def test_a_script(ranks: Status, seen: dict[str, Any], next_: object) -> None:
    assert decide(View(ranks, resumes=False, **seen)) == next_


def views() -> list[View]:
    """All that an agent may see, but for texts and numbers that decide nothing."""
    flags = ("resumes", "stop_asked", "waiting", "stopping", "late", "broken")
    published = (None, *(End(code) for code in (DONE, FAILED, BAD_INPUT, STOPPED)))
    return [
        View(
            ranks,
            published=end,
            silent=silent,
            restarts_left=left,
            **dict(zip(flags, given, strict=True)),
        )
        for ranks, end, silent, left in itertools.product(Status, published, (None, 0), (0, 2))
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
            assert view.ranks is Status.RUNNING and view.resumes and view.waiting
        if isinstance(decision, Keep):
            assert view.ranks in (Status.ABSENT, Status.RUNNING, Status.STOPPED), (
                "what has ended is never waited for"
            )
        if view.published is not None and view.published.code in (FAILED, BAD_INPUT):
            assert isinstance(decision, End), "a failure elsewhere ends all"
        if isinstance(decision, End) and decision.code == DONE:
            assert view.ranks is Status.DONE or view.published == End(DONE), (
                "only who has done the work says so"
            )


@pytest.mark.parametrize(
    ("resumes", "stop_asked", "limited", "seconds"),
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
    resumes: bool, stop_asked: bool, limited: bool, seconds: float
) -> None:
    assert patience(resumes, stop_asked, limited) == seconds
