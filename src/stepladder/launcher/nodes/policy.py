"""What an agent does next: a pure function of what it sees, so each case is a row of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from stepladder.core.errors import BAD_INPUT, DONE, FAILED, STOPPED

NODE_SILENCE_S = 15.0  # without a heartbeat of a node's agent: its ranks count as lost
# After ranks here were stopped from another node: time for a joining node, or the launch's end.
STOP_REASON_TIMEOUT_S = 5.0
GIVEN_UP = "given up: --max-restarts are used"


class Status(Enum):
    """The state of this node's ranks as a group."""

    ABSENT = auto()  # the agent waits for other nodes
    RUNNING = auto()
    DONE = auto()
    STOPPED = auto()  # at a step's end, with a snapshot
    TERMINATED = auto()  # by the signal that asked them to stop, outside their steps
    BAD_INPUT = auto()
    PEER_LOST = auto()  # because a rank of another node has failed
    FAULT = auto()  # possibly transient: a restart may help
    BUG = auto()  # permanent: a restart would fail as well


@dataclass(frozen=True)
class Continue:
    """Change nothing, and poll again."""


@dataclass(frozen=True)
class Stop:
    """Ask the ranks of this node to stop with a snapshot.

    Args:
        text: What to print.
    """

    text: str


@dataclass(frozen=True)
class Restart:
    """End the ranks that still run, join the next rendezvous and start the ranks again.

    Args:
        text: What to print.
        counted: Whether it uses up one of --max-restarts.
    """

    text: str = ""
    counted: bool = False


@dataclass(frozen=True)
class End:
    """The launch has ended.

    Args:
        code: The exit code.
        text: What to print.
    """

    code: int
    text: str = ""


@dataclass(frozen=True)
class View:
    """What one agent sees at one moment.

    Args:
        ranks: The state of the ranks of this node.
        can_resume: The ranks can stop with a snapshot and continue from it; a script's cannot.
        published_end: The launch's end, where another node has published it.
        stop_asked: This agent got a signal to stop.
        nodes_waiting: Other nodes want to join.
        stopping: The ranks here were asked to stop because other nodes want to join.
        at_time_limit: The ranks have stopped by themselves, for a batch job's time limit.
        peers_failed: Ranks of other nodes have failed.
        silent_node: A node that sends no heartbeat, or None.
        seconds_ended: Time since the ranks here have ended.
        restarts_left: Restarts that --max-restarts still allows.
    """

    ranks: Status
    can_resume: bool = True
    published_end: End | None = None
    stop_asked: bool = False
    nodes_waiting: bool = False
    stopping: bool = False
    at_time_limit: bool = False
    peers_failed: bool = False
    silent_node: int | None = None
    seconds_ended: float = 0.0
    restarts_left: int = 0


Decision = Continue | Stop | Restart | End


def decide(view: View) -> Decision:
    """Return the next action of this node's agent."""
    if view.ranks is Status.BAD_INPUT:
        return End(BAD_INPUT)
    if view.published_end is not None and _ends_with_launch(view, view.published_end):
        text = view.published_end.text or "the run has ended on the other nodes"
        return replace(view.published_end, text=text)
    return DECISIONS[view.ranks](view)


def _ends_with_launch(view: View, published_end: End) -> bool:
    """Return whether this node ends at once because the launch has ended elsewhere."""
    if published_end.code in (FAILED, BAD_INPUT):
        return True
    return view.ranks in (Status.ABSENT, Status.PEER_LOST, Status.FAULT)


def _decide_before_start(view: View) -> Decision:
    return _end_before_start(view) if view.stop_asked else Continue()


def _decide_while_running(view: View) -> Decision:
    if view.silent_node is not None:
        return _restart_if_allowed(
            view,
            f"node {view.silent_node} has been silent for {NODE_SILENCE_S:g} s:"
            " restarting all without it",
        )
    if view.stop_asked:
        return Continue()  # the group passes the signal on to the ranks
    if not (view.nodes_waiting or view.stopping):
        return Continue()
    if not view.can_resume:
        return Restart("other nodes have come or gone: restarting all ranks")
    if view.peers_failed:
        return Restart()  # the ranks here would wait in vain for the end of a common step
    if view.stopping:
        return Continue()
    return Stop("other nodes are waiting: ranks stop with a snapshot, and all go on together")


def _decide_when_stopped(view: View) -> Decision:
    """Decide what to do after a stop by a signal, for the time limit or for a node that joins.

    Another node may have asked for the stop.

    Returns:
        End if the launch ends here or has ended on another node, Restart if the nodes start again,
        and Continue while the reason may still arrive from another node.
    """
    if not view.can_resume or view.stop_asked or view.at_time_limit:
        return End(STOPPED)
    if view.published_end is not None:
        return replace(view.published_end, text="")
    if view.stopping or view.nodes_waiting:
        return Restart()
    if view.seconds_ended < STOP_REASON_TIMEOUT_S:
        return Continue()
    return _restart_if_allowed(view)  # the other nodes train without these ranks


def _decide_after_fault(view: View) -> Decision:
    return _decide_after_bug(view) if view.stop_asked else _restart_if_allowed(view)


def _decide_after_bug(view: View) -> End:
    return _end_failed(view, "ended on all nodes")


def _restart_if_allowed(view: View, text: str = "") -> Restart | End:
    if view.stop_asked:
        return _end_before_start(view)
    if view.stopping:
        return Restart(text)  # these ranks were to start again in any case
    if view.restarts_left:
        return Restart(text, counted=True)
    return _end_failed(view, GIVEN_UP)


def _end_before_start(view: View) -> End:
    code = STOPPED if view.can_resume else FAILED
    # What became of a script's ranks has been printed.
    is_told = not view.can_resume and view.ranks is not Status.ABSENT
    return End(code, "" if is_told else "stopped before its ranks had started")


def _end_failed(view: View, text: str) -> End:
    """End with exit code 1; a script's failure has been printed, so it gets no further text."""
    return End(FAILED, text if view.can_resume else "")


# What each state of the ranks asks for, unless the launch has ended on another node.
DECISIONS: dict[Status, Callable[[View], Decision]] = {
    Status.ABSENT: _decide_before_start,
    Status.RUNNING: _decide_while_running,
    Status.DONE: lambda view: End(DONE),
    Status.STOPPED: _decide_when_stopped,
    # The snapshots of earlier steps remain.
    Status.TERMINATED: lambda view: End(STOPPED, "stopped by the signal itself"),
    Status.BAD_INPUT: lambda view: End(BAD_INPUT),
    Status.PEER_LOST: _restart_if_allowed,
    Status.FAULT: _decide_after_fault,
    Status.BUG: _decide_after_bug,
}


def peers_end_timeout(can_resume: bool, stop_asked: bool, time_limited: bool) -> float:
    """Return the seconds that ranks which ended well wait for those of other nodes to end.

    Args:
        can_resume: The ranks save snapshots. Scripts may end at very different times.
        stop_asked: This agent got a signal to stop.
        time_limited: A batch job has a time limit. Slurm ends all agents with the first one that
            exits with 75, and the last snapshot of another node may take long.
    """
    if time_limited:
        return 300.0
    return 30.0 if can_resume or stop_asked else 300.0
