"""Connections between agents over which nothing is said: the kernel ends them with the process at
the other end.

So a killed agent is noticed at once. Nobody has to accept one: it stands while its listener lives.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import suppress

SECONDS_TO_CONNECT = 1.0
MOST_WAITING = 4096  # as many as Linux allows
SECONDS_OF_REST = (
    60  # then the kernel says something, lest a firewall takes the connection for dead
)


class Lifelines:
    """This agent's. host: where others reach it; where there is none, or it cannot be opened,
    nobody listens.
    """

    def __init__(self, host: str) -> None:
        self.listener: socket.socket | None = None
        self.address = (host, 0)
        self.addresses: dict[int, tuple[str, int]] = {}  # of the other agents
        self.held: dict[int, socket.socket | None] = {}
        with suppress(OSError):
            if not host:
                return
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self.listener = socket.create_server((host, 0), family=family, backlog=MOST_WAITING)
            self.address = (host, self.listener.getsockname()[1])

    def ended(self, nodes: Sequence[int]) -> list[int]:
        """Those of these agents whose process has ended, as far as that can be known at once."""
        poll, looked_at = select.poll(), {}
        for node in nodes:
            if (connection := self.held.get(node)) is not None:
                looked_at[connection.fileno()] = node
                poll.register(connection, select.POLLIN)
        broken = [looked_at[number] for number, _ in poll.poll(0)]
        return [
            node
            for node in (*broken, *(n for n in nodes if n not in self.held))
            if not self._connects(node)
        ]

    def _connects(self, node: int) -> bool:
        """Whether somebody listens there. What cannot be reached may yet live: its silence will
        tell.
        """
        self._drop(node)
        self.held[node] = None
        try:
            if self.addresses[node][1]:
                self.held[node] = connection = socket.create_connection(
                    self.addresses[node], SECONDS_TO_CONNECT
                )
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if hasattr(socket, "TCP_KEEPIDLE"):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SECONDS_OF_REST)
        except ConnectionRefusedError:
            return False
        except ConnectionError:  # its end may be under way: looked at again
            self._drop(node)
        except OSError:
            pass
        return True

    def _drop(self, node: int) -> None:
        if (before := self.held.pop(node, None)) is not None:
            before.close()

    def close(self) -> None:
        for node in list(self.held):
            self._drop(node)
        if self.listener is not None:
            self.listener.close()
