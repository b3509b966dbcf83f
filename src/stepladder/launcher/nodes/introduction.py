"""How a node finds the other nodes of a start: it joins running ranks, or waits for a new start.

A node that joins publishes its `NodeInfo` under the first node index that is free, where the other
agents look for it; they are not restarted. Its ranks get the training state from a rank that has
it, after the current step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from torch.distributed import Store  # type: ignore[attr-defined]

from stepladder.core.address import find_free_port
from stepladder.core.console import print_message
from stepladder.core.typed_file import convert
from stepladder.launcher.nodes.local_node import LocalNode, NodeInfo, wait_interruptibly
from stepladder.launcher.nodes.open_rendezvous import OpenRendezvous
from stepladder.launcher.nodes.peers import (
    BROKEN_KEY,
    ENDED_KEY,
    LAUNCH_SCOPE,
    Peers,
    open_start_board,
)
from stepladder.launcher.nodes.signed_board import SignedBoard

CURRENT_START_KEY = "current"  # in the store of all starts
Check = Callable[[], object]


@dataclass(frozen=True)
class _RunningStart:
    """A start whose ranks recover in place.

    Args:
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
        start = _RunningStart(known.attempt, peers.node_count, peers.world_size, known.failed)
        board = SignedBoard(peers.shared_store, LAUNCH_SCOPE, peers.secret)
        board.write(CURRENT_START_KEY, json.dumps(asdict(start)))


def join_running_start(
    shared_store: Store, secret: str, own_info: NodeInfo
) -> tuple[Peers, NodeInfo] | None:
    """Make this node one of the nodes of the current start.

    Args:
        shared_store: The store of all starts.
        secret: The launch's.
        own_info: What this node tells the others.

    Returns:
        The nodes of the start and this node's info updated by it. None if no start is published, if
        it has broken or ended, or if this node took part in it.

    Raises:
        ForgedError: A value was not written by this launch.
    """
    launch_board = SignedBoard(shared_store, LAUNCH_SCOPE, secret)
    if not launch_board.has(CURRENT_START_KEY):
        return None
    start: _RunningStart = convert(json.loads(launch_board.read(CURRENT_START_KEY)), _RunningStart)
    board = open_start_board(shared_store, start.attempt, secret)
    took_part = start.attempt <= own_info.attempt
    if took_part or board.has(BROKEN_KEY) or board.has(ENDED_KEY):
        return None
    known = replace(own_info, attempt=start.attempt, failed=start.failed)
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


def join_running_ranks(node: LocalNode, rendezvous: OpenRendezvous, check: Check) -> Peers | None:
    """Join a start whose ranks train already.

    Args:
        node: This node.
        rendezvous: The open rendezvous.
        check: Called while this waits; an exception from it abandons the wait.

    Returns:
        The nodes of the start, or None if there is none that this node can join.
    """
    store = rendezvous.store
    if store is None:
        return None
    own_info = node.info
    joined = wait_interruptibly(
        lambda: join_running_start(store, rendezvous.secret, own_info), check
    )
    if joined is None:
        return None
    peers, info = joined
    node.set_info(info)
    node.update_info(master=(rendezvous.address, find_free_port()))
    count = len(peers.living_nodes) - 1
    print_message(f"joining the ranks of {count} other nodes, which train already")
    return peers


def introduce_node(
    node: LocalNode, rendezvous: OpenRendezvous, generation: int, check: Check
) -> Peers:
    """Wait until enough nodes have come for a new start, and exchange infos with them.

    Args:
        node: This node.
        rendezvous: The open rendezvous.
        generation: The number of its generation, 0 for none.
        check: Called while this waits; an exception from it abandons the wait.

    Returns:
        The nodes of the start.
    """
    info = wait_interruptibly(rendezvous.handler.next_rendezvous, check)
    peers = Peers(
        info.store, info.rank, info.world_size, rendezvous.secret, shared_store=rendezvous.store
    )
    node.update_info(master=rendezvous.choose_master(info))
    own_info = node.info
    node.set_info(wait_interruptibly(lambda: peers.introduce(own_info), check))
    if info.rank == 0:
        prefix = f"generation {generation}: " if generation else ""
        print_message(f"{prefix}nodes {info.world_size}, ranks {peers.world_size}")
    return peers
