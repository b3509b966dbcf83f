"""Changes to the store through which torch's ranks meet; see torch_fixes.py."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from contextlib import suppress
from functools import wraps
from types import FunctionType
from typing import Any

from stepladder.core.address import is_loopback, resolve_host
from stepladder.core.after_import import call_after_import

RENDEZVOUS_MODULE = "torch.distributed.rendezvous"
_served_stores: list[Any] = []  # those of the first rank, whose server is in this process


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


def keep_stores_of_groups() -> None:
    """Make this process, from now on, able to form one process group after another.

    In torch the store's server on the first rank ends with its group. A rank that forms the next
    group a moment earlier connects to the old server and loses it; with torchrun's store, it reads
    keys of the old group. With this change the server runs until its process ends, and each group
    after the first has keys of its own. All ranks must form their groups in the same order. Seen
    with torch 2.13. Can go when a script that forms and destroys a group a hundred times ends well
    under torchrun.
    """
    call_after_import(RENDEZVOUS_MODULE, _keep_stores)


def make_store_of_one_group(store: Any, rank: int, name: str = "") -> Any:
    """Return a store whose keys no earlier group of the same name has; each rank counts its groups.

    torch names a group that is formed with use_local_synchronization by its ranks. So a rank that
    forms it again reads where the others were in the earlier group, and may wait for them there.

    Args:
        store: A store of all groups of the name.
        rank: This rank in the group.
        name: The name of the group, if groups of other names use the store.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    number = store.add(f"stepladder {name} {rank}", 1)
    return PrefixStore(f"stepladder {number}", store)


def _keep_stores(rendezvous: Any) -> None:
    create_store = getattr(rendezvous, "_create_c10d_store", None)
    if create_store is None or hasattr(create_store, "__wrapped__"):
        return  # torch has no such function, or is patched already
    group_counts: Counter[tuple[str, int]] = Counter()

    @wraps(create_store)
    def create_and_keep_store(
        host_name: str, port: int, rank: int, *args: Any, **options: Any
    ) -> Any:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store = create_store(host_name, port, rank, *args, **options)
        number = group_counts[host_name, port]
        group_counts[host_name, port] += 1
        if rank == 0:
            _served_stores.append(store)
        return PrefixStore(f"group {number}", store) if number else store

    rendezvous._create_c10d_store = create_and_keep_store
