"""Changes to the store through which torch's ranks meet; see torch_fixes.py."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from types import FunctionType
from typing import Any

from stepladder.core.address import is_loopback, resolve_host

RENDEZVOUS_MODULE = "torch.distributed.rendezvous"


def bind_store_to_loopback(own_address: str = "") -> None:
    """Make torch's store listen on the loopback device if MASTER_ADDR is a loopback address.

    torch's own store listens on every address of the machine, and has no setting for it, but it
    accepts a socket that listens already. Applies to this process from now on. Seen with torch 2.11
    to 2.15. Can go when torch's store has an option for the address that it binds.

    Args:
        own_address: The loopback address at which the ranks meet in place of MASTER_ADDR, which
            may be that of another machine, so that they meet nobody else at their port.
    """
    rendezvous: Any = sys.modules.get(RENDEZVOUS_MODULE)
    store_class = getattr(rendezvous, "TCPStore", None)
    if store_class is None or isinstance(store_class, FunctionType):
        return  # torch is not loaded, or is patched already

    def open_store(
        host_name: str, port: int, *args: Any, is_master: bool = False, **options: Any
    ) -> Any:
        host_name = own_address or host_name
        if is_loopback(host_name):
            # The port may be in use by this process's own store, which torch then shares.
            with suppress(OSError):  # torch reports other errors itself
                if is_master:
                    options["master_listen_fd"] = _listen_on(host_name, port)
        return store_class(host_name, port, *args, is_master=is_master, **options)

    rendezvous.TCPStore = open_store


def _listen_on(host: str, port: int) -> int:
    """Return the file descriptor of a socket that listens on the first address of `host`."""
    address = resolve_host(host)[0]
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return socket.create_server((str(address), port), family=family).detach()
