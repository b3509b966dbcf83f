"""Where a rank prints: into a pipe to its launcher, or where that prints, for the person who
started the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from stepladder.rank.open_file import OpenFile

_launchers: list[int] = []  # its stdout and stderr, where this rank's are pipes


def print_to(outputs: Sequence[OpenFile]) -> None:
    """Send stdout and stderr there from now on; to the launcher's for no outputs."""
    for stream, target in enumerate(outputs, start=1):
        _launchers.append(os.dup(stream))
        os.dup2(target.number, stream)
    for target in set(outputs):
        target.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def print_to_launcher() -> None:
    """In the place of a rank that did, and was lost."""
    for stream, target in enumerate(_launchers, start=1):
        (sys.stdout, sys.stderr)[stream - 1].flush()
        os.dup2(target, stream)
        os.close(target)
    _launchers.clear()
