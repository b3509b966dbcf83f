"""Nodes that go on together after a loss agree on it through their store.

When none of a node's ranks is in a group, it gives its word. The first of those that live makes the
next group of them, once it has the word of all. A node whose agent has ended, or of which nothing
is heard, is left out."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from itertools import count

from torch.distributed import DistError

from stepladder.core.address import find_free_port
from stepladder.core.console import print_message
from stepladder.core.typed_file import convert
from stepladder.launcher.local.consensus import NodeVote, Quorum, form_quorum
from stepladder.launcher.nodes.lifelines import Lifelines
from stepladder.launcher.nodes.peers import ENDED, Peers

SECONDS_OF_SILENCE = 6.0  # of a node, before the others go on without it


class NodeCouncil:
    """As one node sees it, for one start. least: so many nodes may go on.  lifelines: to and from
    the others.
    """

    def __init__(self, peers: Peers, least: int, lifelines: Lifelines) -> None:
        self.peers, self.node, self.least, self.lifelines = peers, peers.number, least, lifelines
        lifelines.addresses = peers.lifelines
        host, _ = lifelines.address
        self.host = f"[{host}]" if ":" in host else host
        self.trains = set(range(peers.count))  # nodes that had ranks in the last group
        self.excluded = False  # the others have gone on without this node
        self.board = peers.board
        self.group_number = next(
            number for number in count() if not self.board.has(f"group-{number + 1}/found")
        )
        self._begin(set(peers.gone))

    def _begin(self, gone: set[int]) -> None:
        """What is to be known of the group to come."""
        self.group_number += 1
        self.loss_reported, self.join_requested, self.told = False, False, ""
        self.gone = gone  # before it
        self._address = ""

    def _key(self, name: str) -> str:
        return f"group-{self.group_number}/{name}"

    @property
    def address(self) -> str:
        """Where ranks could meet on this node. Its port is chosen when it is first asked for, not
        days before.
        """
        self._address = self._address or f"{self.host}:{find_free_port()}"
        return self._address

    @property
    def peers_train(self) -> bool:
        return not self.trains <= {self.node, *self.peers.gone}

    @property
    def given_up(self) -> list[int]:
        """The seats of the nodes that all go on without."""
        return [self.peers.seats[node] for node in self.gone]

    @property
    def ranks_finished(self) -> bool:
        return self.board.has(ENDED)

    def new_rank(self, _largest: int) -> int:
        return self.peers.next_rank()

    def poll(self) -> None:
        """Call it often: whoever has come, calls, asks or has ended."""
        self.peers.look_for_newcomers()
        self.loss_reported = self.loss_reported or self.board.has(self._key("called"))
        if not self.join_requested and self.board.has(self._key("asked")):
            self.join_requested = True
            if self.peers.living[0] == self.node:
                print_message("processes on another node are ready: they join after this step")
        for node in self.lifelines.ended(self.peers.listened_to):
            self.lose(node)

    def lose(self, node: int) -> None:
        """Go on without a node."""
        self.peers.lose(node)
        self.report_loss()

    @property
    def spares(self) -> int:
        """How many nodes may be lost yet."""
        return len(self.peers.living) - self.least

    def report_loss(self) -> None:
        if not self.loss_reported:
            self.loss_reported = True
            self.board.write(self._key("called"))

    def request_join(self) -> None:
        if not self.join_requested:
            self.join_requested = True
            self.board.write(self._key("asked"))

    def leave(self, well: bool) -> None:
        """The ranks here have ended. Without `well`, no other group will be formed."""
        with suppress(DistError):
            self.board.write(f"left-{self.node}" if well else self._key("refused"))

    def vote(self, word: NodeVote) -> Quorum | None:
        if (text := json.dumps(asdict(word))) != self.told:
            self.told = text
            self.board.write(self._key(f"word-{self.node}"), text)
        if self.board.has(self._key("refused")) or self.peers.knows_lost(self.node):
            self.excluded = not self.board.has(self._key("refused"))
            return Quorum(None)
        if not self.board.has(self._key("found")):
            self._conclude()
        return self._found() if self.board.has(self._key("found")) else None

    def _conclude(self) -> None:
        """What the words of all make, by the first of those that still have ranks."""
        there = [node for node in self.peers.still_there() if not self.board.has(f"left-{node}")]
        if there[0] != self.node or not all(
            self.board.has(self._key(f"word-{node}")) for node in there
        ):
            return
        words = {
            node: convert(json.loads(self.board.read(self._key(f"word-{node}"))), NodeVote)
            for node in there
        }
        answer = form_quorum(self.group_number, words, len(self.peers.gone - self.gone))
        found = None if answer.membership is None or self.spares < 0 else asdict(answer.membership)
        about = {**asdict(answer), "membership": found, "gone": sorted(self.peers.gone)}
        self.board.write_if_absent(self._key("found"), json.dumps(about))

    def _found(self) -> Quorum:
        about = json.loads(self.board.read(self._key("found")))
        gone = set(about.pop("gone"))
        answer: Quorum = convert(about, Quorum)
        self.excluded = self.node in gone
        if answer.membership is None or self.excluded:
            return Quorum(None)
        for node in sorted(gone - self.gone):
            print_message(f"node {node} is lost: the others go on without it")
        self.trains = set(answer.membership.nodes)
        self.peers.gone |= gone
        self.peers.inquiry.set_members(self.peers.living)
        self._begin(gone)
        return answer
