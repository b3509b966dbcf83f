"""Bad input that several ranks have found: the first of them says it."""

from __future__ import annotations

import re
import signal
import time
from contextlib import suppress
from typing import Any

from stepladder.core.world import World

SECONDS_TO_LEAVE = 10.0  # that a rank with bad input, which ends all, waits for others


def says_it(text: str, store: Any, world: World) -> bool:
    """Whether this rank is the first with bad input of this kind, whatever numbers each has found.

    store: torch's, where ranks meet. Rank 0, which may have it, goes last.
    """
    end, first = time.monotonic() + SECONDS_TO_LEAVE, True
    with suppress(RuntimeError):  # the store has gone, and rank 0 with it
        first = store.add(f"stepladder/told {re.sub('[0-9]+', '', text)}", 1) == 1
        if first:  # Slurm and torchrun end all with the first that leaves
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        left = store.add("stepladder/left", 1)
        while world.is_first and left < world.world_size and time.monotonic() < end:
            time.sleep(0.01)
            left = store.add("stepladder/left", 0)
    return first
