"""An open rendezvous of agents, and a stand-in for the one that the run directory publishes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from stepladder.core.address import find_free_port
from stepladder.launcher.nodes.local_node import NodeInfo
from stepladder.launcher.nodes.node_ids import NodeIds
from stepladder.launcher.nodes.peers import Peers
from stepladder.launcher.nodes.policy import End


class UnpublishedRendezvous:
    """Stands in for a `RunDirRendezvous` where nodes share no folder.

    Agents then know only what is in the store.
    """

    number = 0
    node_ids = NodeIds(Path())

    def poll(self, _given_up: Collection[int] = ()) -> End | None:
        """Return None: no end is published."""
        return None

    def read_end(self) -> End | None:
        """Return None: no end is published."""
        return None

    def end(self, code: int, _text: str = "") -> int:
        """Return `code`: no other node has published one."""
        return code


@dataclass(frozen=True)
class OpenRendezvous:
    """An open rendezvous.

    Args:
        handler: torchelastic's.
        secret: The launch's.
        address: How other nodes reach this one; "" where torch knows it.
        min_nodes: The number of nodes that are enough.
        store: The store of all starts of this generation, if nodes can join running ranks there.
    """

    handler: RendezvousHandler
    secret: str
    address: str = ""
    min_nodes: int = 1
    store: Store | None = None

    def choose_master(self, info: RendezvousInfo) -> tuple[str, int]:
        """Return host and port where ranks would meet on this node.

        The host comes from this node where possible: others can write to the store.
        """
        if self.address:
            return self.address, find_free_port()
        bootstrap = info.bootstrap_store_info
        assert bootstrap is not None
        return str(bootstrap.master_addr), bootstrap.master_port

    def make_rank_variables(self, peers: Peers, known: NodeInfo) -> dict[str, str]:
        """Return the environment variables that all ranks of a node share."""
        host, port = known.master
        return {
            "WORLD_SIZE": str(peers.world_size),
            "GROUP_RANK": str(peers.index),
            "GROUP_WORLD_SIZE": str(peers.node_count),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(known.attempt),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.handler.use_agent_store),
        }
