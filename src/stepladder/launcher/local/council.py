"""Who trains on together after a loss: each node gives its word when none of its ranks is in a
group.

The word of all nodes makes the next group, or says that there had better be none. One node is in
agreement with itself; several agree through a board (nodes/council.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stepladder.rank.membership import BROKEN, LATE, Membership

MOST_REASONS = 8  # that are told of one change: they go into a line of the ledger


@dataclass(frozen=True)
class NodeWord:
    """One node's. members: its ranks that are in no group, by the numbers they were started with.

    trained: how many of them were in the last group; the others join.  reasons: why its ranks left.
    lost: how many ranks it has lost since the last group.  in_vain: the next group would fail as
    well.  file, address: where ranks could meet, on this node alone or from several.  step: in
    which a rank has raised an exception.

    why: what became of the lost ranks.
    """

    members: list[int]
    trained: int
    reasons: list[str]
    lost: int
    in_vain: bool
    file: str
    address: str = ""
    step: int | None = None
    why: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Agreement:
    """What the nodes agree on. found: None where the ranks had better end.  lost, step: a
    `NodeWord`'s, of all.
    """

    found: Membership | None
    lost: int = 0
    step: int | None = None


def agreed(number: int, words: Mapping[int, NodeWord], lost_nodes: int = 0) -> Agreement:
    """The group of this number, from the word of each node that lives."""
    lost = lost_nodes + sum(word.lost for word in words.values())
    joining = any(len(word.members) > word.trained for word in words.values())
    reasons = {reason for word in words.values() for reason in word.reasons}
    # A group that broke without a loss may break again.
    in_vain = (
        not lost and not joining and BROKEN.decode() in reasons and LATE.decode() not in reasons
    )
    seats = sorted((member, node) for node, word in words.items() for member in word.members)
    if (
        in_vain
        or any(word.in_vain for word in words.values())
        or not any(w.trained for w in words.values())
    ):
        return Agreement(None, lost)
    nodes = [node for _, node in seats]
    first = words[nodes[0]]
    meeting = first.file if len(set(nodes)) == 1 else f"tcp://{first.address}"
    step = max((word.step for word in words.values() if word.step is not None), default=None)
    why = [text for word in words.values() for text in word.why]
    why += [f"{lost_nodes} {'node was' if lost_nodes == 1 else 'nodes were'} lost"] * bool(
        lost_nodes
    )
    members = [member for member, _ in seats]
    return Agreement(Membership(number, members, nodes, meeting, why[:MOST_REASONS]), lost, step)


class Council(Protocol):
    """What a node knows of the others while ranks are lost. number: of the group to come, from 1.

    node: this one's number.  called: whether a rank was lost somewhere.  asked: whether one waits
    to join. others_train: whether other nodes have ranks that may go on.  are_done: whether ranks
    have ended well."""

    node: int
    number: int
    called: bool
    asked: bool

    @property
    def others_train(self) -> bool: ...

    @property
    def are_done(self) -> bool: ...

    def look(self) -> None: ...

    def call(self) -> None: ...

    def ask(self) -> None: ...

    def agree(self, word: NodeWord) -> Agreement | None:
        """Give this node's word, and what all have agreed on; None while others have not given
        theirs.
        """

    def next_number(self, largest: int) -> int:
        """What a new rank is called: as no other one of any node, and more than the largest of this
        one.
        """

    @property
    def address(self) -> str:
        """Where ranks of several nodes could meet on this one."""


class OneNode:
    """Nobody else has to agree."""

    node, number, called, asked = 0, 1, False, False
    others_train, are_done, address = False, True, ""

    def look(self) -> None:
        pass

    def call(self) -> None:
        self.called = True

    def ask(self) -> None:
        self.asked = True

    def next_number(self, largest: int) -> int:
        return largest + 1

    def agree(self, word: NodeWord) -> Agreement | None:
        answer = agreed(self.number, {self.node: word})
        self.number, self.called, self.asked = self.number + 1, False, False
        return answer
