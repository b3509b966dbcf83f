"""The moment at which rank 0 pauses, until the checker has sent its signal."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from stepladder.tools.check.events import Paused
from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.check.probe_settings import SIGNALLED_FILE

PAUSE_POLL_S = 0.01
MAX_PAUSE_S = 30.0

counts: Counter[str] = Counter()


def reaches(kind: str) -> bool:
    """Count a moment of this kind, and return whether it is the one at which to pause."""
    log = current_log()
    if not log.settings.pause_at or log.rank > 0:
        return False
    counts[kind] += 1
    return log.settings.pause_at == f"{kind}:{counts[kind]}"


def pause_at(kind: str) -> None:
    """Pause if this is the moment; the handler of the signal runs meanwhile."""
    if reaches(kind):
        wait_for_signal()


def pause_within_save(path: str) -> None:
    """Pause with half of the file on the disk, if this is the moment."""
    if not reaches("save"):
        return
    file = Path(path)
    if not file.is_file():  # such as one in memory
        wait_for_signal()
        return
    contents = file.read_bytes()
    os.truncate(path, len(contents) // 2)
    wait_for_signal()
    file.write_bytes(contents)


def wait_for_signal() -> None:
    log = current_log()
    log.write(Paused())
    deadline = time.monotonic() + MAX_PAUSE_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            os.stat(f"{log.settings.folder}/{SIGNALLED_FILE}")  # noqa: PTH116  # not a look of the script
            return
        time.sleep(PAUSE_POLL_S)
