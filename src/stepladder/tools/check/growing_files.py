"""The recordings and outputs of ranks that run, read as they grow."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from stepladder.tools.check.events import (
    Backward,
    Forward,
    GroupDestroy,
    GroupInit,
    ScriptCollective,
)
from stepladder.tools.check.standstill import ObservedProcesses

LAST_LINE_BYTES = 4000
BLOCKING_EVENTS = (ScriptCollective, Backward, GroupInit, Forward, GroupDestroy)


class GrowingFiles:
    """The recordings and outputs in a folder, of which only what is new is read.

    Args:
        observed: The processes that write them; they learn which rank each is.
    """

    def __init__(self, observed: ObservedProcesses) -> None:
        self.folder = observed.folder
        self.observed = observed
        self.sizes: dict[str, int] = {}

    def read_added(self) -> bytes:
        """Return what has been added to the files since the last call."""
        added = b""
        for path in [*self.folder.glob("*.jsonl"), *self.folder.glob("*.out")]:
            known = self.sizes.get(path.name, 0)
            size = path.stat().st_size
            if size > known:
                with path.open("rb") as file:
                    file.seek(known)
                    grown = file.read(size - known)
                added += grown
                if path.suffix == ".jsonl":
                    self.observed.add_events(path, grown)
                self.sizes[path.name] = size
        return added


def is_blocked(folder: Path) -> bool:
    """Return whether the last event of any rank is one in which it may block."""
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as file:
            with suppress(OSError):  # a shorter file is read from its beginning
                file.seek(-LAST_LINE_BYTES, os.SEEK_END)
            lines = file.read().splitlines()
        if lines and any(event.marker() in lines[-1] for event in BLOCKING_EVENTS):
            return True
    return False
