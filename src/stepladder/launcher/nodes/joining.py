"""A node that joins ranks which train already, without a restart of the others.

It publishes its `NodeInfo` under the first node index that is free, where the other agents look for
it. Its ranks get the training state from a rank that has it, after the current step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from torch.distributed import Store  # type: ignore[attr-defined]

from stepladder.core.typed_file import convert
from stepladder.launcher.nodes.local_node import NodeInfo
from stepladder.launcher.nodes.peers import (
    BROKEN_KEY,
    ENDED_KEY,
    LAUNCH_SCOPE,
    Peers,
    open_start_board,
)
from stepladder.launcher.nodes.signed_board import SignedBoard

CURRENT_START_KEY = "current"  # in the store of all starts


@dataclass(frozen=True)
class RunningStart:
    """A start whose ranks recover in place.

    Attributes:
        attempt: Its number.
        nodes: The number of nodes that it began with.
        ranks: The number of ranks that it began with.
        failed: See `NodeInfo`.
    """

    attempt: int
    nodes: int
    ranks: int
    failed: tuple[int, int]


def announce_start(peers: Peers, known: NodeInfo) -> None:
    """Publish, on the first node, that other nodes can join this start."""
    if peers.index == 0:
        start = RunningStart(
            known.attempt,
            peers.node_count,
            peers.world_size,
            known.failed,
        )
        board = SignedBoard(peers.shared_store, LAUNCH_SCOPE, peers.secret)
        board.write(CURRENT_START_KEY, json.dumps(asdict(start)))


def join_running_start(
    shared_store: Store, secret: str, own: NodeInfo
) -> tuple[Peers, NodeInfo] | None:
    """Make this node one of the nodes of the current start.

    Args:
        shared_store: The store of all starts.
        secret: The launch's.
        own: What this node tells the others.

    Returns:
        The nodes of the start and this node's info updated by it. None if no start is published, if
        it has broken or ended, or if this node took part in it.

    Raises:
        Forged: A value was not written by this launch.
    """
    launch_board = SignedBoard(shared_store, LAUNCH_SCOPE, secret)
    if not launch_board.has(CURRENT_START_KEY):
        return None
    start: RunningStart = convert(json.loads(launch_board.read(CURRENT_START_KEY)), RunningStart)
    board = open_start_board(shared_store, start.attempt, secret)
    took_part = start.attempt <= own.attempt
    if took_part or board.has(BROKEN_KEY) or board.has(ENDED_KEY):
        return None
    known = replace(own, attempt=start.attempt, failed=start.failed)
    text = json.dumps(asdict(known))
    index = start.nodes
    while board.write_if_absent(f"node-{index}", text) != text:
        index += 1
    peers = Peers(shared_store, index, index + 1, secret)
    peers.begin_start(start.attempt, start.ranks)
    for node in range(index):
        peers.register_peer(node, json.loads(board.read(f"node-{node}")))
    peers.update_living_nodes()
    return peers, known
