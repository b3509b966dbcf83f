"""The back end "stepladder" of torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from stepladder.exchange.process_group import SharedMemoryGroup
from stepladder.exchange.queue_thread import end_threads_at_exit
from stepladder.rank.torch_fixes_store import keep_stores_of_groups, make_store_of_one_group

BACKEND_NAME = "stepladder"


def _make_group(store: Store, rank: int, size: int, timeout: timedelta) -> SharedMemoryGroup:
    """Return a group that shares memory, for torch's registry of back ends.

    This is a collective: all ranks of the group must call it.

    Args:
        store: A store of this group alone.
        rank: This rank.
        size: The number of ranks.
        timeout: How long a collective waits for other ranks.
    """
    group = SharedMemoryGroup(store, rank, size)
    gloo_store = make_store_of_one_group(store, rank)
    gloo = ProcessGroupGloo(gloo_store, rank, size, timeout=timeout)
    group_type = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(group_type)
    group._register_backend(torch.device("cpu"), group_type, gloo)
    return group


def register_backend() -> None:
    """Make `init_process_group(backend="stepladder")` known to torch."""
    keep_stores_of_groups()
    end_threads_at_exit()
    if not hasattr(dist.Backend, BACKEND_NAME.upper()):
        dist.Backend.register_backend(BACKEND_NAME, _make_group, devices=["cpu"])
