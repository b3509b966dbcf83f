"""One report of bad input that every rank of srun or torchrun finds before the ranks meet.

For this the ranks connect to the store of their rendezvous once, and the first one to do so prints.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

from stepladder.core.address import resolve_host
from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.rank.error_reporter import REPORT_TIMEOUT_S, is_first_to_report
from stepladder.rank.progress import PROGRESS_VARIABLE
from stepladder.rank.torch_fixes_store import bind_store_to_loopback


def should_report(text: str) -> bool:
    """Return whether this process prints what is wrong with the input."""
    if PROGRESS_VARIABLE in os.environ:  # our own launcher started it, and prints its ranks' errors
        return True
    # If the ranks cannot connect, each one reports.
    with suppress(InputError, ImportError, OSError, RuntimeError, ValueError):
        world = World.detect()
        if world.world_size > 1:
            return is_first_to_report(text, _open_store(world), world)
    return True


def _open_store(world: World) -> Any:
    """Open the store of the ranks' rendezvous; rank 0 serves it unless torchrun does."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    bind_store_to_loopback()
    from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

    host, port = world.endpoint
    if not host or not port or not resolve_host(host):
        raise ValueError
    serves = world.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=REPORT_TIMEOUT_S)
    return TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False)
