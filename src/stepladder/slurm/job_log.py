"""The output of a batch job, as it grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepladder.core.errors import InputError

SECONDS_BETWEEN_READS = 0.5
SECONDS_BETWEEN_QUESTIONS = 3.0  # to Slurm's controller, which serves everybody
PIECE = 1 << 20


def pieces(path: Path, is_over: Callable[[], bool] | None = None) -> Iterator[bytes]:
    """What the file holds, and with `is_over` what is added until that is true. Raises InputError without one."""
    if not path.exists() and is_over is None:
        raise InputError(f"the job has written nothing yet ({path})", "stepladder logs -f JOB, which waits for it")
    asked, over, place = time.monotonic(), False, 0
    while True:
        piece = read_from(path, place)
        place += len(piece)
        if piece:
            yield piece
        elif is_over is None or over:
            return
        elif time.monotonic() - asked > SECONDS_BETWEEN_QUESTIONS:
            asked, over = time.monotonic(), is_over()  # then once more, for what was written meanwhile
        else:
            time.sleep(SECONDS_BETWEEN_READS)


def read_from(path: Path, place: int) -> bytes:
    try:
        with path.open("rb") as opened:  # anew each time: a network file system looks then
            opened.seek(place)
            return opened.read(PIECE)
    except FileNotFoundError:
        return b""
