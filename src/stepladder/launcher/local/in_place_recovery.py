"""In-place recovery: when ranks are lost, the other ranks form a new group and continue.

No rank is restarted, and no snapshot is read. The launcher sees which rank has ended and notifies
the others. They leave the broken group and report why. Once all of them wait, the launcher sends
them the members of the next group and the URL of its rendezvous. A replacement process reports in
the same way when it is ready to join; the other ranks then leave their group after the current
step. recovery_policy.py decides what is done next, and this module does it.
On several nodes, each launcher does this for its own ranks, and the launchers agree on the members
of the next group by a vote (consensus.py).
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Collection, Set
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from stepladder.core.console import print_message
from stepladder.launcher.local.consensus import Consensus, NodeVote, Quorum
from stepladder.launcher.local.outcome import Failure, Raised
from stepladder.launcher.local.rank_process import RankProcess
from stepladder.launcher.local.recovery_policy import (
    FailureAction,
    RecoveryAction,
    RecoveryView,
    decide,
    decide_on_failure,
)
from stepladder.launcher.local.restart_policy import RestartPolicy
from stepladder.rank.error_record import ErrorKind
from stepladder.rank.membership import (
    GROUP_JOINED,
    Membership,
    make_control_sockets,
    send_loss,
    send_membership,
)
from stepladder.rank.open_file import MemoryFile

MAX_MESSAGE_BYTES = 64
MAX_REPLACEMENTS = 3  # how many are started in a row while none of them has joined


class RecoveryState(Enum):
    """Whether the next group can be formed."""

    OPEN = auto()  # the group is formed when all remaining ranks wait for it
    VOTING = auto()  # this node has voted, votes of other nodes are missing
    REFUSED = auto()  # there is no next group, because its ranks would fail as well


@dataclass(frozen=True)
class GroupActions:
    """What the recovery can ask the launcher to do with the ranks of the node.

    Args:
        start_replacement: Starts a process that replaces a lost rank, under a new number.
        request_regroup: Asks a rank to leave its group after the current step.
        release_locks: Releases the locks of the run directory, for a rank of another node that
            writes to the directory from now on.
    """

    start_replacement: Callable[[RankProcess, int], RankProcess]
    request_regroup: Callable[[int], None]
    release_locks: Callable[[], None]


class InPlaceRecovery:
    """In-place recovery of the ranks of one node.

    A rank is identified by the number that it was started with, which no other rank ever gets.

    Args:
        policy: Reports failures, and decides which are permanent.
        actions: What the launcher does on request.
        consensus: The agreement with the other nodes.
        min_ranks: A lost rank whose replacement soon fails as well is not replaced once more if at
            least this number of ranks remains. None if a lost rank is always replaced.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        actions: GroupActions,
        consensus: Consensus,
        min_ranks: int | None,
    ) -> None:
        # The ranks that failed since the last group was formed.
        self.failed: list[RankProcess] = []
        # The ranks that the others continue without.
        self.abandoned: set[int] = set()
        # The replacements and new ranks that have not joined a group yet.
        self.joining: dict[int, RankProcess] = {}
        # Whether the next group can be formed.
        self.state = RecoveryState.OPEN
        self._policy = policy
        self._actions = actions
        self._consensus = consensus
        self._min_ranks = min_ranks
        # The file store of the rendezvous of each new group, if all its ranks are on this node.
        self._rendezvous_file = MemoryFile("rendezvous")
        self._channels: dict[int, socket.socket] = {}
        self._started_ranks: set[int] = set()
        self._grouped_ranks: set[int] = set()  # the ranks that have been in a group
        # For each rank that waits for the next group: why it left its group.
        self._leave_reasons: dict[int, bytes] = {}
        self._replacement_count = 0  # replacements started since a rank last joined
        # The number of the group that was to come when the ranks were last told of a loss, and
        # asked to let others join.
        self._loss_sent_for = 0
        self._regroup_requested_for = 0

    def open_channel(self, rank: int) -> socket.socket:
        """Open a control channel to a rank.

        Returns:
            The rank's end, which the caller closes once the rank's process has inherited it.
        """
        self._channels[rank], rank_end = make_control_sockets()
        self._started_ranks.add(rank)
        return rank_end

    def add_joining(self, member: RankProcess) -> None:
        """Note that a rank was started which will join a group that trains already."""
        self.joining[member.rank] = member

    @property
    def channels(self) -> list[socket.socket]:
        """The launcher's ends of the open channels."""
        return list(self._channels.values())

    def receive(self, ready: Collection[object]) -> None:
        """Read the messages from ranks.

        Args:
            ready: The objects that can be read without waiting, among them channels.
        """
        for rank, channel in list(self._channels.items()):
            if channel in ready:
                self._receive_from(rank, channel)

    def _receive_from(self, rank: int, channel: socket.socket) -> None:
        message = b""
        with suppress(OSError):
            message = channel.recv(MAX_MESSAGE_BYTES)
        if message == GROUP_JOINED:
            self._grouped_ranks.add(rank)
        elif message:
            self._leave_reasons[rank] = message
        else:  # the rank has ended
            self._close_channel(rank)

    def _close_channel(self, rank: int) -> None:
        self._leave_reasons.pop(rank, None)
        channel = self._channels.pop(rank, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Close all channels."""
        for rank in list(self._channels):
            self._close_channel(rank)

    def can_continue_without(self, member: RankProcess, alive: set[int]) -> bool:
        """Return whether the other ranks may continue without a rank that has failed.

        Args:
            member: The rank that has failed.
            alive: The other ranks of this node that are alive.
        """
        error = member.read_error()
        action = decide_on_failure(
            member.rank,
            alive,
            self.joining.keys(),
            self._grouped_ranks,
            self.abandoned,
            is_refused=self._is_refused,
            has_lost_state=error is not None and error.kind is ErrorKind.STATE_LOST,
            affects_all_ranks=error is not None and error.affects_all_ranks,
            peers_train=self._consensus.peers_train,
        )
        if action is FailureAction.ABANDON:
            self._abandon_joining(member)
        elif action is FailureAction.RECOVER:
            self._close_channel(member.rank)
            self.failed.append(member)
        elif action is FailureAction.REFUSE:
            self.state = RecoveryState.REFUSED
        return action not in (FailureAction.REFUSE, FailureAction.END)

    def _abandon_joining(self, member: RankProcess) -> None:
        self._policy.report(member.determine_failure())
        print_message(f"rank {member.rank} was to join the other ranks, which continue without it")
        self._close_channel(member.rank)
        del self.joining[member.rank]
        self.abandoned.add(member.rank)
        was_killed = member.process.exitcode == -signal.SIGKILL
        if was_killed and self._replacement_count < MAX_REPLACEMENTS:
            self._start_replacement(member)

    def _start_replacement(self, member: RankProcess) -> None:
        rank = self._consensus.new_rank(max(self._started_ranks))
        self._replacement_count += 1
        self.joining[rank] = self._actions.start_replacement(member, rank)

    def poll(self, alive: set[int]) -> bool:
        """Form the next group once all ranks whose group is broken, or that join, wait for it.

        Args:
            alive: The ranks of this node that are alive.

        Returns:
            False if the ranks must be ended now, because there will be no next group.
        """
        self._consensus.poll()
        while True:
            view = self._make_view(alive - self.joining.keys())
            action = decide(view)
            if action is RecoveryAction.VOTE:
                return self._vote(view)
            if action in (RecoveryAction.WAIT, RecoveryAction.END):
                return action is RecoveryAction.WAIT
            self._carry_out(action, view)

    def _make_view(self, training: Set[int]) -> RecoveryView:
        consensus = self._consensus
        return RecoveryView(
            training,
            self.joining.keys(),
            self._leave_reasons.keys(),
            has_failed=bool(self.failed),
            is_refused=self._is_refused,
            loss_reported=consensus.loss_reported,
            join_requested=consensus.join_requested,
            loss_sent=self._loss_sent_for >= consensus.group_number,
            regroup_requested=self._regroup_requested_for >= consensus.group_number,
            # Where it decides nothing, several nodes need not read it from their store.
            ranks_finished=not training and not self.failed and consensus.ranks_finished,
        )

    @property
    def _is_refused(self) -> bool:
        return self.state is RecoveryState.REFUSED

    def _carry_out(self, action: RecoveryAction, view: RecoveryView) -> None:
        consensus = self._consensus
        match action:
            case RecoveryAction.REFUSE:
                self._send_refusals()
            case RecoveryAction.KILL_JOINING:
                self._kill_joining_ranks()
            case RecoveryAction.REPORT_LOSS:
                consensus.report_loss()
            case RecoveryAction.REQUEST_JOIN:
                consensus.request_join()
            case RecoveryAction.SEND_LOSS:
                self._send_loss()
            case RecoveryAction.REQUEST_REGROUP:
                self._request_regroup(view.training - view.waiting)

    def _kill_joining_ranks(self) -> None:
        for member in self.joining.values():
            member.process.kill()
        self.abandoned |= self.joining.keys()
        self.joining.clear()

    def _send_loss(self) -> None:
        self._loss_sent_for = self._consensus.group_number
        for channel in self._channels.values():
            send_loss(channel)

    def _request_regroup(self, ranks: Set[int]) -> None:
        self._regroup_requested_for = self._consensus.group_number
        for rank in ranks:
            self._actions.request_regroup(rank)

    def _send_refusals(self) -> None:
        for rank in list(self._leave_reasons):
            self._reply(rank, None)

    def _vote(self, view: RecoveryView) -> bool:
        """Vote on the next group, and form it once all nodes have voted. Returns as `poll` does."""
        failures = [member.determine_failure() for member in self.failed]
        quorum = self._consensus.vote(self._make_vote(failures, len(view.training)))
        if quorum is None:
            self.state = RecoveryState.VOTING
            return True
        if quorum.membership is None:
            self.state = RecoveryState.REFUSED
            self._send_refusals()
            return bool(view.training) and not failures
        self.state = RecoveryState.OPEN
        self._form_group(quorum, quorum.membership, len(view.training))
        return True

    def _make_vote(self, failures: list[Failure], trained_count: int) -> NodeVote:
        errors = [failure.error for failure in failures if isinstance(failure, Raised)]
        failed_steps = [error.step for error in errors if error.step is not None]
        return NodeVote(
            members=sorted(self._leave_reasons),
            trained_count=trained_count,
            leave_reasons=sorted({reason.decode() for reason in self._leave_reasons.values()}),
            lost_count=len(failures),
            is_permanent=any(self._policy.is_permanent(failure) for failure in failures),
            file_url=f"file://{self._rendezvous_file.path}?group={self._consensus.group_number}",
            address=self._consensus.address,
            failed_step=max(failed_steps, default=None),
            loss_reasons=[failure.summary for failure in failures],
        )

    def _form_group(self, quorum: Quorum, membership: Membership, trained_count: int) -> None:
        """Send the waiting ranks the next group, and replace the ranks that were lost."""
        failed = self.failed
        self.failed = []
        for member in failed:
            self._policy.record_failure(member.determine_failure())
        if quorum.lost_count:  # the same step may fail on another node
            self._policy.note_failed_step(quorum.failed_step)
        has_first_rank = membership.nodes[0] == self._consensus.node
        if has_first_rank or failed:
            _print_group(quorum, membership)
        if not has_first_rank:
            self._actions.release_locks()
        self._admit(membership)
        for member in failed:
            self.abandoned.add(member.rank)
            if self._needs_replacement(member, trained_count):
                self._start_replacement(member)

    def _admit(self, membership: Membership) -> None:
        for rank in membership.members:
            if rank not in self._leave_reasons:
                continue
            self._grouped_ranks.add(rank)
            if self.joining.pop(rank, None) is not None:
                self._replacement_count = 0
            self._reply(rank, membership)

    def _reply(self, rank: int, membership: Membership | None) -> None:
        """Send a waiting rank the members of the next group, or None if there is none."""
        send_membership(self._channels[rank], membership)
        del self._leave_reasons[rank]

    def _needs_replacement(self, member: RankProcess, trained_count: int) -> bool:
        if self._min_ranks is None or trained_count < self._min_ranks:
            return True
        if not self._policy.is_repeated_failure(member.local_rank):
            return True
        print_message(
            f"rank {member.rank} replaced another rank, and failed within a minute of it:"
            " it is not replaced"
        )
        return False


def _print_group(quorum: Quorum, membership: Membership) -> None:
    size = len(membership.members)
    processes = "1 process" if size == 1 else f"{size} processes"
    cause = "in-place recovery" if quorum.lost_count else "another process has joined"
    print_message(f"{cause}: continuing with {processes}")
