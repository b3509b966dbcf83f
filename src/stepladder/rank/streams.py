"""The output of a rank: a pipe to its launcher, or the launcher's own stdout and stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from stepladder.rank.open_file import OpenFile

STDOUT = 1
# Copies of the launcher's stdout and stderr, if this rank prints into pipes.
_launcher_streams: list[int] = []


def redirect_output(outputs: Sequence[OpenFile]) -> None:
    """Replace stdout and stderr by these files; without files the launcher's stay."""
    for number, target in enumerate(outputs, start=STDOUT):
        _launcher_streams.append(os.dup(number))
        os.dup2(target.number, number)
    for target in set(outputs):
        target.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def restore_launcher_output() -> None:
    """Print to the launcher's stdout and stderr from now on, in place of a rank that was lost."""
    streams = (sys.stdout, sys.stderr)
    for number, target in enumerate(_launcher_streams, start=STDOUT):
        streams[number - STDOUT].flush()
        os.dup2(target, number)
        os.close(target)
    _launcher_streams.clear()
