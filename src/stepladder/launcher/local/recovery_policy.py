"""What the launcher of one node does after a loss: pure functions of what it sees.

So each case is a row of a table in their test. `decide` and `decide_on_failure` are those of
in-place recovery, `decide_on_end` of an attempt whose ranks have failed.
"""

from __future__ import annotations

import signal
from collections.abc import Set
from dataclasses import dataclass
from enum import Enum, auto

from stepladder.launcher.local.outcome import Failure, Killed

# Asked to stop by them, a rank ends at once before its first step: earlier snapshots remain.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # a closed terminal sends SIGHUP to its group


class RecoveryAction(Enum):
    """What in-place recovery does next."""

    WAIT = auto()
    END = auto()  # end the ranks: there will be no next group
    REFUSE = auto()  # tell the ranks that wait for the next group that there is none
    KILL_JOINING = auto()  # no group is left that they could join
    REPORT_LOSS = auto()  # to the other nodes
    REQUEST_JOIN = auto()  # from the other nodes
    SEND_LOSS = auto()  # to the ranks, which leave their group at once
    REQUEST_REGROUP = auto()  # of the ranks, which leave their group after the current step
    VOTE = auto()  # on the next group


@dataclass(frozen=True)
class RecoveryView:
    """What the launcher of one node sees at one moment.

    Args:
        training: The ranks of this node that live and are not joining.
        joining: The ranks of this node that have not joined a group yet.
        waiting: The ranks of this node that are in no group, and wait for the next one.
        has_failed: A rank of this node has failed since the last group was formed.
        is_refused: There is no next group.
        loss_reported: A node has lost a rank since the last group was formed.
        join_requested: A node has ranks that wait to join.
        loss_sent: The ranks here know of the loss.
        regroup_requested: The ranks here know that others wait to join.
        ranks_finished: Ranks have finished the training.
    """

    training: Set[int] = frozenset()
    joining: Set[int] = frozenset()
    waiting: Set[int] = frozenset()
    has_failed: bool = False
    is_refused: bool = False
    loss_reported: bool = False
    join_requested: bool = False
    loss_sent: bool = False
    regroup_requested: bool = False
    ranks_finished: bool = False


def decide(view: RecoveryView) -> RecoveryAction:
    """Return the next action; after all but WAIT, END and VOTE there is another one at once."""
    if view.is_refused:
        if view.waiting:
            return RecoveryAction.REFUSE
        return RecoveryAction.WAIT if view.training else RecoveryAction.END
    if view.ranks_finished and not view.training and not view.has_failed:
        return RecoveryAction.KILL_JOINING if view.joining else RecoveryAction.WAIT
    return _decide_on_notice(view) or _decide_on_vote(view)


def _decide_on_notice(view: RecoveryView) -> RecoveryAction | None:
    """Return what to tell other nodes or the ranks here, if anything."""
    has_left = bool(view.training & view.waiting)
    has_lost = view.has_failed or (has_left and not view.join_requested)
    if has_lost and not view.loss_reported:
        return RecoveryAction.REPORT_LOSS
    if view.joining & view.waiting and not view.join_requested:
        return RecoveryAction.REQUEST_JOIN
    if view.loss_reported and not view.loss_sent:
        return RecoveryAction.SEND_LOSS
    if view.join_requested and not view.regroup_requested:
        return RecoveryAction.REQUEST_REGROUP
    return None


def _decide_on_vote(view: RecoveryView) -> RecoveryAction:
    needs_new_group = view.loss_reported or view.join_requested
    return (
        RecoveryAction.VOTE
        if needs_new_group and view.training <= view.waiting
        else RecoveryAction.WAIT
    )


class FailureAction(Enum):
    """What in-place recovery does when a rank has failed."""

    IGNORE = auto()  # the others continue without it already
    ABANDON = auto()  # it was to join
    RECOVER = auto()  # the other ranks form a new group
    REFUSE = auto()  # all ranks end, on other nodes too
    END = auto()  # all ranks of this node end


def decide_on_failure(
    rank: int,
    alive: Set[int] = frozenset(),
    joining: Set[int] = frozenset(),
    grouped: Set[int] = frozenset(),
    abandoned: Set[int] = frozenset(),
    is_refused: bool = False,
    has_lost_state: bool = False,
    affects_all_ranks: bool = False,
    peers_train: bool = False,
) -> FailureAction:
    """Return whether, and how, the other ranks continue without a rank that has failed.

    Args:
        rank: The rank.
        alive: The other ranks of this node that live.
        joining: The ranks of this node that have not joined a group yet.
        grouped: The ranks of this node that have been in a group.
        abandoned: The ranks that the others continue without.
        is_refused: There is no next group.
        has_lost_state: The rank found that nobody has the state of the training.
        affects_all_ranks: The rank's error is one of all ranks.
        peers_train: Other nodes have ranks that may continue the training.
    """
    if rank in abandoned:
        return FailureAction.IGNORE
    if rank in joining and not is_refused:
        return FailureAction.ABANDON
    if has_lost_state:
        return FailureAction.REFUSE
    if is_refused or affects_all_ranks:
        return FailureAction.END
    is_training = peers_train or not alive <= joining
    # A rank that waits for its first group reads no notification until the wait times out.
    can_be_notified = grouped >= {rank, *alive} - joining
    return FailureAction.RECOVER if is_training and can_be_notified else FailureAction.END


class EndAction(Enum):
    """What the launcher does when an attempt has ended with a failure."""

    STOP = auto()  # a rank was ended by the signal that asked it to stop
    FAIL = auto()  # a restart would be in vain, or the ranks were asked to stop
    SHRINK = auto()  # restart all ranks but one
    RESTART = auto()
    GIVE_UP = auto()  # no restart is left


def was_stopped(failure: Failure) -> bool:
    """Return whether a rank has died of a request to stop, as it does before it trains."""
    return isinstance(failure, Killed) and failure.signal_number in STOP_SIGNALS


def decide_on_end(
    failure: Failure,
    is_stopping: bool = False,
    is_permanent: bool = False,
    may_shrink: bool = False,
    restarts_left: int = 0,
) -> EndAction:
    """Return what to do after an attempt that has ended with a failure.

    Args:
        failure: How the attempt has ended.
        is_stopping: The ranks were asked to stop.
        is_permanent: A restart would fail in the same way.
        may_shrink: The same rank failed a short time ago, and fewer ranks are enough.
        restarts_left: Restarts that --max-restarts still allows.
    """
    if is_stopping:
        return EndAction.STOP if was_stopped(failure) else EndAction.FAIL
    if is_permanent:
        return EndAction.FAIL
    if may_shrink:
        return EndAction.SHRINK
    return EndAction.RESTART if restarts_left else EndAction.GIVE_UP
