"""What the agent of a node does next: a pure function of what it sees, so each case is a row of a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from stepladder.core.errors import BAD_INPUT, DONE, FAILED, STOPPED

SECONDS_OF_SILENCE = 15.0  # of another node's agent, before its ranks count as lost
SECONDS_TO_LEARN_WHY = (
    5.0  # after ranks were stopped from elsewhere: for a joining node, or the launch's end
)
GIVEN_UP = "given up: --max-restarts are used"


class Status(Enum):
    """How the ranks of this node are, or have ended, as a group."""

    ABSENT = auto()  # the agent waits for other nodes
    RUNNING = auto()
    DONE = auto()
    STOPPED = auto()  # at a step's end, with a snapshot
    TERMINATED = auto()  # by the signal that asked them to stop, outside their steps
    BAD_INPUT = auto()
    PEER_LOST = auto()  # because a rank of another node has failed
    FAULT = auto()
    BUG = auto()  # a restart would be in vain


@dataclass(frozen=True)
class Keep:
    """Go on as before, and look again."""


@dataclass(frozen=True)
class Stop:
    """Ask the ranks here to stop with a snapshot. text, as in the others: to show."""

    text: str


@dataclass(frozen=True)
class Restart:
    """End what still runs here, meet the other nodes anew, start again. counted: as one of --max-restarts."""

    text: str = ""
    counted: bool = False


@dataclass(frozen=True)
class End:
    """The launch has ended, with an exit code."""

    code: int
    text: str = ""


@dataclass(frozen=True)
class View:
    """What one agent sees at one moment.

    resumes: the ranks can stop with a snapshot and go on from it, as a script's cannot.
    published: the launch's end, where another node has published it.  stop_asked: a signal came here.
    waiting: other nodes want to join.  stopping: the ranks here were asked to stop for them.
    late: the ranks have stopped by themselves, for a batch job's time limit.
    broken: ranks of other nodes have failed.  silent: a node of which nothing is heard, or None.
    seconds_ended: since the ranks here have ended.
    """

    ranks: Status
    resumes: bool = True
    published: End | None = None
    stop_asked: bool = False
    waiting: bool = False
    stopping: bool = False
    late: bool = False
    broken: bool = False
    silent: int | None = None
    seconds_ended: float = 0.0
    restarts_left: int = 0


def decide(view: View) -> Keep | Stop | Restart | End:
    """What comes next on this node."""
    ranks, ended = view.ranks, view.published
    if ranks is Status.BAD_INPUT:
        return End(BAD_INPUT)
    if ended is not None and (
        ended.code in (FAILED, BAD_INPUT)
        or ranks in (Status.ABSENT, Status.PEER_LOST, Status.FAULT)
    ):
        return replace(ended, text=ended.text or "the run has ended on the other nodes")
    match ranks:
        case Status.ABSENT:
            return _end_unstarted(view) if view.stop_asked else Keep()
        case Status.RUNNING:
            return _while_running(view)
        case Status.DONE:
            return End(DONE)
        case Status.STOPPED:
            return _when_stopped(view)
        case Status.TERMINATED:
            return End(STOPPED, "stopped by the signal itself")  # what was saved earlier is there
        case Status.PEER_LOST:
            return _restart(view)
    if ranks is Status.BUG or view.stop_asked:
        return _end_failed(view, "ended on all nodes")
    return _restart(view)


def _while_running(view: View) -> Keep | Stop | Restart | End:
    if view.silent is not None:
        seconds = f"{SECONDS_OF_SILENCE:g} s"
        return _restart(
            view, f"node {view.silent} has been silent for {seconds}: restarting all without it"
        )
    if view.stop_asked or not (view.waiting or view.stopping):
        return Keep()  # what a signal asks, their group tells the ranks
    if not view.resumes:
        return Restart("other nodes have come or gone: restarting all ranks")
    if view.broken:
        return Restart()  # ours would wait in vain for a common step's end
    if view.stopping:
        return Keep()
    return Stop("other nodes are waiting: ranks stop with a snapshot, and all go on together")


def _when_stopped(view: View) -> Keep | Restart | End:
    """By a signal, for the time limit, or for a node that joins: another node may have decided it."""
    if not view.resumes or view.stop_asked or view.late:
        return End(STOPPED)
    if view.published is not None:
        return replace(view.published, text="")
    if view.stopping or view.waiting:
        return Restart()
    return (
        Keep() if view.seconds_ended < SECONDS_TO_LEARN_WHY else _restart(view)
    )  # the others have gone on


def _restart(view: View, text: str = "") -> Restart | End:
    """Where that is wanted, and allowed."""
    if view.stop_asked:
        return _end_unstarted(view)
    if view.stopping:
        return Restart(text)  # it was to come in any case
    return Restart(text, counted=True) if view.restarts_left else _end_failed(view, GIVEN_UP)


def _end_unstarted(view: View) -> End:
    return End(STOPPED, "stopped before its ranks had started") if view.resumes else End(FAILED)


def _end_failed(view: View, text: str) -> End:
    """How a script has failed was shown, and that is all there is to say."""
    return End(FAILED, text if view.resumes else "")


def patience(resumes: bool, stop_asked: bool, limited: bool) -> float:
    """Seconds that ranks which have ended well wait for those of other nodes to do so too.

    limited: by a batch job's time limit: Slurm ends all agents with the first that leaves with 75, and a last
    snapshot may take long. Scripts may end at different times.
    """
    return 300.0 if limited or not (resumes or stop_asked) else 30.0
