"""What ends a rank's work before its time: a stop, and `train --fail-at`, a failure to see a
recovery.

Stopping well: a signal only sets a flag; the trainer acts on it at a step's end, all ranks
together."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from stepladder.core.errors import InputError
from stepladder.core.numbers import whole
from stepladder.rank.keepsake import has_keeper

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
END_TIME = (
    "STEPLADDER_END_TIME"  # of the batch job, in seconds since 1970; not there without a limit
)
SECONDS_TO_LEAVE = 10.0  # after the last snapshot: to end all ranks and to ask for the next start


def seconds_left() -> float:
    """Until the batch job's time limit; infinite where there is none. Raises InputError."""
    text = os.environ.get(END_TIME, "")
    end = whole(text)
    if text and end is None:
        raise InputError(
            f"{END_TIME} is {text!r}, not seconds since 1970",
            f"unset {END_TIME}, or date +%s -d TIME",
        )
    return math.inf if end is None else end - time.time()


def unless_ignored(numbers: Iterable[int]) -> list[int]:
    """Without a SIGHUP that `nohup` has switched off."""
    off = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in numbers if not (off and number == signal.SIGHUP)]


class StopSignals:
    """While open, SIGTERM, SIGHUP and the first Ctrl-C set `asked`; a second Ctrl-C interrupts as
    usual.
    """

    def __init__(self) -> None:
        self.asked = self.interrupted = False
        self._before: dict[int, Any] = {}
        self.end = time.perf_counter() + seconds_left()
        self.looked, self.longest, self.late = math.inf, 0.0, False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._on_signal) for number in unless_ignored(HANDLED)
            }
        return self

    def is_late(self, now: float) -> bool:
        """Whether one more step could pass the time limit, on a cluster that does not warn, or too
        late.

        Asked once per step, at `perf_counter() == now`: the longest time between two questions,
        which holds snapshots too, is what one more step may take; as long again is left for the
        last snapshot."""
        self.longest, self.looked = max(self.longest, now - self.looked), now
        self.late = now + 2 * self.longest + SECONDS_TO_LEAVE > self.end
        return self.late

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.interrupted |= number == signal.SIGINT
        self.asked = True

    def __exit__(self, *_: object) -> None:
        """A launcher hands its signal on, and a batch system may have sent this rank the same one
        before.
        """
        leaves = self.asked and has_keeper()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if leaves else handler)


def parse_place(text: str) -> tuple[int, int]:
    """RANK:STEP as numbers; steps count from 1. Raises InputError."""
    rank, _, step = text.partition(":")
    number, count = whole(rank), whole(step, 1)
    if number is None or count is None:
        raise InputError(
            f"--fail-at {text!r} is not RANK:STEP", "--fail-at 1:20; steps count from 1"
        )
    return number, count


def has_failed(run_dir: Path, rank: int, step: int) -> bool:
    """Whether `kill_once` has been there."""
    return _marker(run_dir, rank, step).exists()


def kill_once(run_dir: Path, rank: int, step: int) -> None:
    """SIGKILL for this process, once per run directory: a marker is left, and the step is passed
    next time.
    """
    try:
        _marker(run_dir, rank, step).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _marker(run_dir: Path, rank: int, step: int) -> Path:
    return run_dir / f"failed-at-{rank}-{step}"
