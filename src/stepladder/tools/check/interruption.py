"""A start of the script that is interrupted at a chosen moment, as a cluster interrupts it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stepladder.tools.check.events import Paused
from stepladder.tools.check.probe_settings import SIGNALLED_FILE

if TYPE_CHECKING:
    from stepladder.tools.check.fork_servers import ForkedProcess


class Interruption:
    """Sends a signal to ranks once rank 0 has paused, and SIGKILL to all after a time of grace.

    Args:
        moment: Where rank 0 pauses; see ProbeSettings.
        number: The signal.
        grace_s: The seconds between the signal and SIGKILL.
        last_rank_only: Whether the signal is for the last rank alone.
    """

    def __init__(
        self, moment: str, number: int, grace_s: float, last_rank_only: bool = False
    ) -> None:
        self.moment = moment
        self.number = number
        self.grace_s = grace_s
        self.last_rank_only = last_rank_only
        self.signalled_at = 0.0

    def poll(self, added: bytes, processes: list[ForkedProcess], folder: Path) -> None:
        """Send what is due.

        Args:
            added: What was recorded since the last call.
            processes: The ranks.
            folder: The folder of the recordings.
        """
        if not self.signalled_at and Paused.marker() in added:
            for process in processes[-1:] if self.last_rank_only else processes:
                process.send_signal(self.number)
            (folder / SIGNALLED_FILE).touch()
            self.signalled_at = time.monotonic()
        elif self.signalled_at and time.monotonic() - self.signalled_at > self.grace_s:
            for process in processes:
                process.send_signal(signal.SIGKILL)
