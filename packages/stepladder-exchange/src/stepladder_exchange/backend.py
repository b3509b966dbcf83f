"""The back end "stepladder" of torch.distributed, of which torch hears when it is imported."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

from stepladder_exchange.after_import import call_after_import
from stepladder_exchange.torch_fixes_store import keep_stores_of_groups, make_store_of_one_group

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store  # type: ignore[attr-defined]

    from stepladder_exchange.process_group import SharedMemoryGroup

BACKEND_NAME = "stepladder"


def register_backend() -> None:
    """Make `init_process_group("stepladder")` known to torch: now, or when torch is imported."""
    keep_stores_of_groups()
    call_after_import("torch.distributed", _register)


def _register(dist: Any) -> None:
    from stepladder_exchange.queue_thread import end_threads

    if dist.is_available() and not hasattr(dist.Backend, BACKEND_NAME.upper()):
        dist.Backend.register_backend(BACKEND_NAME, _make_group, devices=["cpu"])
        atexit.register(end_threads)


def _make_group(store: Store, rank: int, size: int, timeout: timedelta) -> SharedMemoryGroup:
    """Return a group that shares memory, for torch's registry of back ends.

    This is a collective: all ranks of the group must call it.

    Args:
        store: A store of this group alone.
        rank: This rank.
        size: The number of ranks.
        timeout: How long a collective waits for other ranks.
    """
    import torch
    from torch.distributed import ProcessGroup, ProcessGroupGloo

    from stepladder_exchange.process_group import SharedMemoryGroup

    group = SharedMemoryGroup(store, rank, size)
    gloo_store = make_store_of_one_group(store, rank)
    gloo = ProcessGroupGloo(gloo_store, rank, size, timeout=timeout)
    group_type = ProcessGroup.BackendType.GLOO
    group._set_default_backend(group_type)
    group._register_backend(torch.device("cpu"), group_type, gloo)
    return group
