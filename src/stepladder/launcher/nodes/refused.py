"""Bad input that ranks of srun or torchrun find before they meet: they do so for once, to say it
once.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from stepladder.core.address import resolve_host
from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.rank.error_reporter import REPORT_TIMEOUT_S, is_first_to_report
from stepladder.rank.progress import PROGRESS_VARIABLE
from stepladder.rank.torch_fixes import bind_store_to_loopback


def speaks_for_all(text: str) -> bool:
    """Whether this process is to show what is wrong with the input."""
    if PROGRESS_VARIABLE in os.environ:  # of a launcher of ours, which shows its ranks' errors
        return True
    with suppress(
        InputError, ImportError, OSError, RuntimeError, ValueError
    ):  # each speaks for itself
        world = World.detect()
        if world.world_size > 1:
            return is_first_to_report(text, _store(world), world)
    return True


def _store(world: World) -> Any:
    """Where the ranks of the world would have met; rank 0 has it, unless torchrun does."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    bind_store_to_loopback()
    from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

    place = urlsplit(world.init_method)
    host, port = place.hostname, place.port
    if world.init_method == "env://":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not host or port is None or not resolve_host(host):
        raise ValueError
    has_it = world.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=REPORT_TIMEOUT_S)
    return TCPStore(host, port, is_master=has_it, timeout=patience, wait_for_workers=False)
