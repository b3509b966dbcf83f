"""Consensus of the nodes through their store: which ranks continue in place after a loss.

When none of a node's ranks is in a process group, the node writes its vote. The first living node
forms the next group once it has the votes of all living nodes. A node whose agent has ended, or
that sends no heartbeat, is left out.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from itertools import count

from torch.distributed import DistError

from stepladder.core.address import find_free_port
from stepladder.core.console import print_message
from stepladder.core.typed_file import convert
from stepladder.launcher.local.consensus import Consensus, NodeVote, Quorum, form_quorum
from stepladder.launcher.nodes.liveness import LivenessConnections
from stepladder.launcher.nodes.peers import ENDED_KEY, Peers

IN_PLACE_SILENCE_S = 6.0  # without a node's heartbeat, until the others continue in place

# Keys of one group's values. The vote of node 2 is `vote-2`.
VOTE_KEY = "vote-{}"
RESULT_KEY = "result"  # what the votes gave: the next group, or that there is none
LOSS_KEY = "called"  # a rank was lost
JOIN_KEY = "asked"  # a rank waits to join
REFUSED_KEY = "refused"  # no further group is formed
# A key of the whole start: the ranks of this node have finished.
FINISHED_KEY = "left-{}"


class StoreConsensus(Consensus):
    """The consensus as one node takes part in it, for one start.

    Args:
        peers: The nodes of the start.
        min_nodes: The number of nodes that are enough to continue.
        liveness: Connections to the other agents.
    """

    def __init__(self, peers: Peers, min_nodes: int, liveness: LivenessConnections) -> None:
        self.peers = peers
        # The values of the start.
        self.board = peers.board
        super().__init__(peers.index, self._find_next_number())
        self.min_nodes = min_nodes
        self.liveness = liveness
        liveness.set_peers(peers.liveness_addresses)
        # Whether the other nodes continue without this one.
        self.excluded = False
        host = liveness.address[0]
        self._host = f"[{host}]" if ":" in host else host
        self._address = ""
        self._written_vote = ""
        self._training_nodes = set(range(peers.node_count))  # that had ranks in the last group
        self._lost_in_result = set(peers.lost_nodes)  # as the last result named them

    def _find_next_number(self) -> int:
        """Return the number of the first group that was not formed yet."""
        return next(n for n in count(1) if not self.board.has(f"group-{n}/{RESULT_KEY}"))

    def _begin_next_group(self) -> None:
        super()._begin_next_group()
        self._address = ""
        self._written_vote = ""

    def _key(self, name: str) -> str:
        return f"group-{self.group_number}/{name}"

    @property
    def address(self) -> str:
        """Host and port where ranks could meet on this node.

        The port is chosen when it is needed: a port that was free days ago may be in use.
        """
        self._address = self._address or f"{self._host}:{find_free_port()}"
        return self._address

    @property
    def peers_train(self) -> bool:
        """Whether other nodes have ranks that may continue."""
        return not self._training_nodes <= {self.node, *self.peers.lost_nodes}

    @property
    def lost_ids(self) -> list[int]:
        """The ids of the nodes that all continue without."""
        return [self.peers.node_ids[node] for node in self._lost_in_result]

    @property
    def ranks_finished(self) -> bool:
        """Whether ranks of some node have ended well."""
        return self.board.has(ENDED_KEY)

    @property
    def spare_nodes(self) -> int:
        """The number of nodes that may still be lost."""
        return len(self.peers.living_nodes) - self.min_nodes

    def new_rank(self, _max_rank: int) -> int:
        """Return a rank number that no rank of any node has."""
        return self.peers.claim_rank()

    def poll(self) -> None:
        """Poll for nodes that joined, were lost, or reported a loss; call it often."""
        self.peers.add_joined_nodes()
        self.loss_reported = self.loss_reported or self.board.has(self._key(LOSS_KEY))
        if not self.join_requested and self.board.has(self._key(JOIN_KEY)):
            self.join_requested = True
            if self.peers.living_nodes[0] == self.node:
                print_message("processes on another node are ready: they join after this step")
        for node in self.liveness.find_ended(self.peers.monitored_nodes):
            self.mark_lost(node)

    def mark_lost(self, node: int) -> None:
        """Continue without a node."""
        self.peers.mark_lost(node)
        self.report_loss()

    def report_loss(self) -> None:
        """Report that a rank was lost."""
        if not self.loss_reported:
            super().report_loss()
            self.board.write(self._key(LOSS_KEY))

    def request_join(self) -> None:
        """Report that a rank waits to join."""
        if not self.join_requested:
            super().request_join()
            self.board.write(self._key(JOIN_KEY))

    def report_ended(self, well: bool) -> None:
        """Report that the ranks of this node have ended.

        Args:
            well: They have finished. Otherwise no further group is formed.
        """
        with suppress(DistError):
            self.board.write(FINISHED_KEY.format(self.node) if well else self._key(REFUSED_KEY))

    def vote(self, vote: NodeVote) -> Quorum | None:
        """Write this node's vote, and return what all agreed on; None while votes are missing."""
        text = json.dumps(asdict(vote))
        if text != self._written_vote:
            self._written_vote = text
            self.board.write(self._key(VOTE_KEY.format(self.node)), text)
        if self.board.has(self._key(REFUSED_KEY)):
            self.excluded = False
            return Quorum(None)
        if self.peers.is_marked_lost(self.node):
            self.excluded = True
            return Quorum(None)
        if not self.board.has(self._key(RESULT_KEY)):
            self._count_votes()
        return self._read_result() if self.board.has(self._key(RESULT_KEY)) else None

    def _count_votes(self) -> None:
        """Form the next group, on the first node that still has ranks and once all have voted."""
        living = self.peers.update_living_nodes()
        voters = [node for node in living if not self.board.has(FINISHED_KEY.format(node))]
        if voters[0] != self.node:
            return
        keys = [self._key(VOTE_KEY.format(node)) for node in voters]
        if not all(self.board.has(key) for key in keys):
            return
        votes = {
            node: convert(json.loads(self.board.read(key)), NodeVote)
            for node, key in zip(voters, keys, strict=True)
        }
        result = form_quorum(
            self.group_number, votes, len(self.peers.lost_nodes - self._lost_in_result)
        )
        record = asdict(result)
        if self.spare_nodes < 0:
            record["membership"] = None
        record["lost_nodes"] = sorted(self.peers.lost_nodes)
        self.board.write_if_absent(self._key(RESULT_KEY), json.dumps(record))

    def _read_result(self) -> Quorum:
        record = json.loads(self.board.read(self._key(RESULT_KEY)))
        lost_nodes = set(record.pop("lost_nodes"))
        result: Quorum = convert(record, Quorum)
        self.excluded = self.node in lost_nodes
        if result.membership is None or self.excluded:
            return Quorum(None)
        for node in sorted(lost_nodes - self._lost_in_result):
            print_message(f"node {node} is lost: the others go on without it")
        self._training_nodes = set(result.membership.nodes)
        self.peers.exclude_nodes(lost_nodes)
        self._lost_in_result = lost_nodes
        self._begin_next_group()
        return result
