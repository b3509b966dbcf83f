"""A node that comes to ranks which train already: it is one of their nodes from then on, and nobody
starts again.

It writes its word under the first number that is free, where the others look for it. Its ranks get
the state from a rank that has it, after the step that the others are in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from torch.distributed import Store  # type: ignore[attr-defined]

from stepladder.core.typed_file import convert
from stepladder.launcher.nodes.board import SignedBoard
from stepladder.launcher.nodes.own_node import Introduction
from stepladder.launcher.nodes.peers import BROKEN, ENDED, SCOPE, Peers, board_of_start

CURRENT = "current"  # the last start, in the store of all starts


@dataclass(frozen=True)
class RunningStart:
    """A start whose ranks go on in place. attempt: its number.  nodes, ranks: how many began.
    failed: see `Introduction`."""

    attempt: int
    nodes: int
    ranks: int
    failed: tuple[int, int]


def announce(peers: Peers, known: Introduction) -> None:
    """By the first node of a start: others may come to it."""
    if peers.number == 0:
        current = RunningStart(known.attempt, peers.count, peers.world_size, known.failed)
        SignedBoard(peers.common, SCOPE, peers.secret).write(CURRENT, json.dumps(asdict(current)))


def join(common: Store, secret: str, own: Introduction) -> tuple[Peers, Introduction] | None:
    """As one of the nodes of the start that is under way, with what this node knows by it.

    None where there is none, where it has broken or ended, or where this node was in it already.
    Raises Forged."""
    board = SignedBoard(common, SCOPE, secret)
    if not board.has(CURRENT):
        return None
    current: RunningStart = convert(json.loads(board.read(CURRENT)), RunningStart)
    start = board_of_start(common, current.attempt, secret)
    if current.attempt <= own.attempt or start.has(BROKEN) or start.has(ENDED):
        return None
    known, number = replace(own, attempt=current.attempt, failed=current.failed), current.nodes
    word = json.dumps(asdict(known))
    while start.write_if_absent(f"node-{number}", word) != word:
        number += 1
    peers = Peers(common, number, number + 1, secret)
    peers.world_size = current.ranks
    peers.enter(current.attempt)
    for node in range(number):
        peers.meet(node, json.loads(start.read(f"node-{node}")))
    peers.still_there()
    return peers, known
