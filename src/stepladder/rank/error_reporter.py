"""Choose one rank to report an error that several ranks have found in their input."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from typing import Any

from stepladder.core.waiting import wait_until
from stepladder.core.world import World

REPORT_TIMEOUT_S = 10.0  # that a rank with bad input, which ends all ranks, waits for the others
REPORT_POLL_S = 0.01
ENDING_RANKS_KEY = "stepladder/left"


def is_first_to_report(text: str, store: Any, world: World) -> bool:
    """Tell whether this rank is the first one with this error.

    Numbers in the text do not count, since they may differ on each rank. Rank 0, which may serve
    the store, waits up to REPORT_TIMEOUT_S seconds here until all ranks are ending.

    Args:
        text: The text of the error.
        store: The store of torch through which the ranks connect.
        world: The rank of this process, and the number of ranks.

    Returns:
        True if no other rank has reported this error, or if the store has ended.
    """
    text_without_numbers = re.sub("[0-9]+", "", text)
    is_first = True
    with suppress(RuntimeError):  # the store has ended, and rank 0 with it
        is_first = store.add(f"stepladder/told {text_without_numbers}", 1) == 1
        if is_first:  # Slurm and torchrun end all ranks with the first one that ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        store.add(ENDING_RANKS_KEY, 1)
        if world.is_first:
            wait_until(
                lambda: store.add(ENDING_RANKS_KEY, 0) >= world.world_size,
                REPORT_TIMEOUT_S,
                poll_s=REPORT_POLL_S,
            )
    return is_first
