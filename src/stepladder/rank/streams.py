"""Where a rank prints: into a file of its own, or where its launcher does, for the person who started the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

_launchers: list[int] = []  # its stdout and stderr, where this rank's are files


def print_to(outputs: Iterable[Path]) -> None:
    """From now on stdout and stderr go there; to the launcher's for no outputs."""
    for stream, path in enumerate(outputs, start=1):
        _launchers.append(os.dup(stream))
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, stream)
        os.close(target)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def print_to_launcher() -> None:
    """In the place of a rank that did, and was lost."""
    for stream, target in enumerate(_launchers, start=1):
        (sys.stdout, sys.stderr)[stream - 1].flush()
        os.dup2(target, stream)
        os.close(target)
    _launchers.clear()
