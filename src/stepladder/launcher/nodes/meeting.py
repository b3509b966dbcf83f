"""What an agent is given: an open rendezvous, and where the launch's end is published."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from stepladder.core.address import find_free_port
from stepladder.launcher.nodes.own_node import Introduction
from stepladder.launcher.nodes.peers import Peers
from stepladder.launcher.nodes.policy import End
from stepladder.launcher.nodes.seats import Seats


class Unpublished:
    """In place of a `Rendezvous`, where nodes share no folder: what the store says is all they
    know.
    """

    number, seats = 0, Seats(Path())

    def look(self, _given_up: Collection[int] = ()) -> End | None:
        return None

    read_end = look

    def end(self, code: int, _text: str = "") -> int:
        return code


@dataclass(frozen=True)
class Meeting:
    """An open rendezvous. secret: of the launch.  address: this node's for the others, "" where
    torch knows it.

    least: so many nodes are enough.  store: the generation's own, where a node may find ranks that
    train already."""

    handler: RendezvousHandler
    secret: str
    address: str = ""
    least: int = 1
    store: Store | None = None

    def own_master(self, info: RendezvousInfo) -> tuple[str, int]:
        """Where ranks would meet on this node: not what anybody may have written into the store."""
        if self.address:
            return self.address, find_free_port()
        told = info.bootstrap_store_info
        assert told is not None
        return str(told.master_addr), told.master_port

    def variables_of_ranks(self, peers: Peers, known: Introduction) -> dict[str, str]:
        """Those that all ranks of a node are given alike."""
        host, port = known.master
        return {
            "WORLD_SIZE": str(peers.world_size),
            "GROUP_RANK": str(peers.number),
            "GROUP_WORLD_SIZE": str(peers.count),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(known.attempt),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.handler.use_agent_store),
        }
