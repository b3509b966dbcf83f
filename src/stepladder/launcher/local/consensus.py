"""The agreement of all nodes on the next group of ranks after a loss.

A node casts its vote when none of its ranks is in a group. The votes of all living nodes determine
the next group, or that there is none. A single node decides alone; several nodes agree through a
store that they share (nodes/store_consensus.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from stepladder.rank.membership import GROUP_BROKEN, GROUP_LATE, Membership

MAX_LOSS_REASONS = 8  # of one change: they are written into a line of the ledger


@dataclass(frozen=True)
class NodeVote:
    """The vote of one node on the next group.

    Args:
        members: The ranks of the node that are in no group, by the numbers they were started with.
        trained_count: How many of the members were in the last group. The others join.
        leave_reasons: Why the members left the last group, as in `rank.membership`.
        lost_count: How many ranks the node has lost since the last group.
        is_permanent: Whether the failure of a lost rank would end the next group as well.
        file_url: Where ranks of this node alone can meet.
        address: Where ranks of several nodes can meet on this node.
        failed_step: The step in which a lost rank raised an exception.
        loss_reasons: What happened to the lost ranks, a sentence for each.
    """

    members: list[int]
    trained_count: int
    leave_reasons: list[str]
    lost_count: int
    is_permanent: bool
    file_url: str
    address: str = ""
    failed_step: int | None = None
    loss_reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Quorum:
    """The result of a vote.

    Args:
        membership: The next group; None if there must be none, so that the ranks end.
        lost_count: How many ranks and nodes were lost since the last group.
        failed_step: The step in which a lost rank raised an exception.
    """

    membership: Membership | None
    lost_count: int = 0
    failed_step: int | None = None


def form_quorum(group_number: int, votes: Mapping[int, NodeVote], lost_nodes: int = 0) -> Quorum:
    """Return the next group of ranks, or that there is none.

    Args:
        group_number: The number of the next group.
        votes: The vote of each living node, by node.
        lost_nodes: How many nodes were lost since the last group.
    """
    lost_count = lost_nodes + sum(vote.lost_count for vote in votes.values())
    if not _can_form_group(votes.values(), lost_count):
        return Quorum(None, lost_count)
    located = sorted((member, node) for node, vote in votes.items() for member in vote.members)
    members = [member for member, _ in located]
    nodes = [node for _, node in located]
    first_vote = votes[nodes[0]]
    is_one_node = len(set(nodes)) == 1
    url = first_vote.file_url if is_one_node else f"tcp://{first_vote.address}"
    reasons = [reason for vote in votes.values() for reason in vote.loss_reasons]
    if lost_nodes:
        reasons.append("1 node was lost" if lost_nodes == 1 else f"{lost_nodes} nodes were lost")
    membership = Membership(group_number, members, nodes, url, reasons[:MAX_LOSS_REASONS])
    failed_steps = [v.failed_step for v in votes.values() if v.failed_step is not None]
    return Quorum(membership, lost_count, max(failed_steps, default=None))


def _can_form_group(votes: Collection[NodeVote], lost_count: int) -> bool:
    has_training_state = any(vote.trained_count for vote in votes)
    if not has_training_state or any(vote.is_permanent for vote in votes):
        return False
    return lost_count > 0 or not _would_break_again(votes)


def _would_break_again(votes: Collection[NodeVote]) -> bool:
    """Return whether the last group broke although no rank was lost and none joins."""
    if any(len(vote.members) > vote.trained_count for vote in votes):
        return False
    reasons = {reason for vote in votes for reason in vote.leave_reasons}
    return GROUP_BROKEN.decode() in reasons and GROUP_LATE.decode() not in reasons


class Consensus:
    """What a node knows of the other nodes while ranks are lost or join: here, that it is alone.

    Args:
        node: The number of this node.
        group_number: The number of the next group, from 1.
    """

    def __init__(self, node: int = 0, group_number: int = 1) -> None:
        self.node = node
        self.group_number = group_number
        # Whether a node has lost a rank since the last group was formed.
        self.loss_reported = False
        # Whether a node has ranks that wait to join.
        self.join_requested = False

    @property
    def peers_train(self) -> bool:
        """Whether other nodes have ranks that may continue the training."""
        return False

    @property
    def ranks_finished(self) -> bool:
        """Whether ranks have finished the training."""
        return True

    @property
    def address(self) -> str:
        """The address on this node where ranks of several nodes can meet."""
        return ""

    def poll(self) -> None:
        """Read what the other nodes have reported."""

    def report_loss(self) -> None:
        """Report to all nodes that a rank of this node was lost."""
        self.loss_reported = True

    def request_join(self) -> None:
        """Report to all nodes that a rank of this node waits to join."""
        self.join_requested = True

    def new_rank(self, max_rank: int) -> int:
        """Return a number for a new rank, which no rank of any node has had.

        Args:
            max_rank: The largest number of a rank of this node.
        """
        return max_rank + 1

    def vote(self, vote: NodeVote) -> Quorum | None:
        """Cast or change the vote of this node.

        Returns:
            The result; None while votes of other nodes are missing.
        """
        quorum = form_quorum(self.group_number, {self.node: vote})
        self._begin_next_group()
        return quorum

    def _begin_next_group(self) -> None:
        self.group_number += 1
        self.loss_reported = False
        self.join_requested = False
