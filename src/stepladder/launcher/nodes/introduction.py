"""How a node finds the other nodes of a start: it joins running ranks, or waits for a new start."""

from __future__ import annotations

from collections.abc import Callable

from stepladder.core.address import find_free_port
from stepladder.core.console import print_message
from stepladder.launcher.nodes.joining import join_running_start
from stepladder.launcher.nodes.local_node import LocalNode, wait_interruptibly
from stepladder.launcher.nodes.open_rendezvous import OpenRendezvous
from stepladder.launcher.nodes.peers import Peers

Check = Callable[[], object]


def join_running_ranks(
    node: LocalNode,
    rendezvous: OpenRendezvous,
    check: Check,
) -> Peers | None:
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


def meet_peers(
    node: LocalNode,
    rendezvous: OpenRendezvous,
    generation: int,
    check: Check,
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
        info.store,
        info.rank,
        info.world_size,
        rendezvous.secret,
        shared_store=rendezvous.store,
    )
    node.update_info(master=rendezvous.choose_master(info))
    own_info = node.info
    node.set_info(wait_interruptibly(lambda: peers.introduce(own_info), check))
    if info.rank == 0:
        prefix = f"generation {generation}: " if generation else ""
        print_message(f"{prefix}nodes {info.world_size}, ranks {peers.world_size}")
    return peers
