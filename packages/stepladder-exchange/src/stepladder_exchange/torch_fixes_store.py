"""Changes to the store through which torch's ranks meet, so that they can form several groups."""

from __future__ import annotations

from collections import Counter
from functools import wraps
from typing import Any

from stepladder_exchange.after_import import call_after_import

RENDEZVOUS_MODULE = "torch.distributed.rendezvous"
_served_stores: list[Any] = []  # those of the first rank, whose server is in this process


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
