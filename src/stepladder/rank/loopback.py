"""The store where the ranks of one machine meet, on its loopback device: torch's own listens on
every address.
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from types import FunctionType
from typing import Any

from stepladder.core.address import addresses_of, is_loopback


def keep_store_on_loopback() -> None:
    """From now on in this process, where torch is loaded and MASTER_ADDR is a loopback address.

    torch (2.11 to 2.13) has no setting for it, but its store takes a socket that listens already.
    """
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    store = getattr(rendezvous, "TCPStore", None)
    if store is None or isinstance(store, FunctionType):  # no such torch, or done already
        return

    def on_loopback(
        host_name: str, port: int, *args: Any, is_master: bool = False, **options: Any
    ) -> Any:
        if is_master and is_loopback(host_name):
            with suppress(
                OSError
            ):  # in use: by this process's own store, which torch shares, or torch says so
                options["master_listen_fd"] = _listener(host_name, port)
        return store(host_name, port, *args, is_master=is_master, **options)

    rendezvous.TCPStore = on_loopback


def _listener(host: str, port: int) -> int:
    first = addresses_of(host)[0]
    family = socket.AF_INET if first.version == 4 else socket.AF_INET6
    return socket.create_server((str(first), port), family=family).detach()
