"""Connections between agents that carry no data: the kernel closes them when a process ends.

So the death of an agent is noticed at once. A listener does not accept its connections: each one
stays open as long as the listener's process lives.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait

LIVENESS_CONNECT_TIMEOUT_S = 1.0
LISTEN_BACKLOG = 4096  # the largest that Linux allows
KEEPALIVE_IDLE_S = 60  # then the kernel sends a probe, or a firewall drops the connection as idle

Address = tuple[str, int]


class LivenessConnections:
    """The listener of this agent and its connections to other agents."""

    def __init__(self, host: str) -> None:
        """Listen on a free port.

        Args:
            host: Where other agents reach this one. If it is "" or cannot be opened, there is no
                listener, and this agent's death is noticed by its missing heartbeat.
        """
        # Host and port where this agent listens; port 0 if it does not.
        self.address: Address = (host, 0)
        self._peer_addresses: Mapping[int, Address] = {}
        self._connections: dict[int, socket.socket | None] = {}
        self._listener: socket.socket | None = None
        if not host:
            return
        with suppress(OSError):
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family, backlog=LISTEN_BACKLOG)
            self.address = (host, self._listener.getsockname()[1])

    def set_peers(self, addresses: Mapping[int, Address]) -> None:
        """Set where the agents of the other nodes listen; the mapping may grow later."""
        self._peer_addresses = addresses

    def find_ended(self, nodes: Sequence[int]) -> list[int]:
        """Return those of these nodes whose agent has certainly ended."""
        node_by_connection = {
            connection: node for node in nodes if (connection := self._connections.get(node))
        }
        ready = wait([*node_by_connection], 0)
        broken = [node for connection, node in node_by_connection.items() if connection in ready]
        unconnected = [node for node in nodes if node not in self._connections]
        return [node for node in broken + unconnected if not self._connect(node)]

    def _connect(self, node: int) -> bool:
        """Connect to a node, to notice when its process ends.

        A node that cannot be reached may still live: its heartbeat decides.

        Returns:
            False if no process listens at the node's address, otherwise True.
        """
        self._disconnect(node)
        self._connections[node] = None
        address = self._peer_addresses[node]
        if not address[1]:
            return True
        try:
            connection = socket.create_connection(address, LIVENESS_CONNECT_TIMEOUT_S)
            self._connections[node] = connection
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        except ConnectionRefusedError:
            return False
        except ConnectionError:  # the process may be ending: the next call tries again
            self._disconnect(node)
        except OSError:
            pass
        return True

    def _disconnect(self, node: int) -> None:
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close the listener, which other agents take as the end of this one."""
        for node in list(self._connections):
            self._disconnect(node)
        if self._listener is not None:
            self._listener.close()
