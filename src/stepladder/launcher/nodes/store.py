"""Stores where agents meet, and torchelastic's rendezvous over them.

torchelastic's own limits take 44 s to go on without a lost node, and some of its waits have no limit at all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from stepladder.launcher.nodes.policy import SECONDS_OF_SILENCE

SECONDS_TO_ANSWER = 30
# Clocks of nodes must agree to these 3 s.
LIMITS = {"last_call_timeout": 3.0, "keep_alive_interval": 1.0, "keep_alive_max_attempt": 3.0}


def open_store(host: str, port: int, serves: bool) -> TCPStore:
    """At host:port, where port 0 is any free one; one that does not serve waits for one that does."""
    return TCPStore(
        host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=SECONDS_TO_ANSWER)
    )


def handler_over(
    store: TCPStore, name: str, nodes: tuple[int, int], address: str, limits: Mapping[str, float]
) -> DynamicRendezvousHandler:
    """A rendezvous of at least nodes[0] and at most nodes[1] agents. address: how the others reach this one.

    limits: torchelastic's, in seconds; join_timeout, for enough nodes to come, has to be among them.
    """
    limits = LIMITS | dict(limits)
    timeout = RendezvousTimeout(
        join=timedelta(seconds=limits["join_timeout"]), last_call=timedelta(seconds=limits["last_call_timeout"])
    )
    handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
        name, store, C10dRendezvousBackend(store, name), *nodes, address, timeout,
        keep_alive_interval=int(limits["keep_alive_interval"]),
        keep_alive_max_attempt=int(limits["keep_alive_max_attempt"]),
    )  # fmt: skip
    return handler


def leave(handler: RendezvousHandler) -> None:
    """Be no part of it any more, without closing it for the others."""
    if isinstance(handler, DynamicRendezvousHandler):
        handler._stop_heartbeats()


def limit_silence(port: int) -> None:
    """Let the kernel end our connections to the store when its node falls silent: torch would wait for ever."""
    for found in psutil.Process().net_connections("tcp"):
        if found.raddr and found.raddr.port == port:
            with suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as connection:  # closed meanwhile
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SECONDS_OF_SILENCE))
