"""What ends a rank's work early: a request to stop, or the failure that `--fail-at` causes.

A signal only sets a flag; the trainer reads it at a step's end, and all ranks stop together.
"""

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
from stepladder.core.numbers import parse_whole_number
from stepladder.rank.fd_store import has_fd_store

TRAINING_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The batch job's end in seconds since 1970; not set without a time limit.
END_TIME_VARIABLE = "STEPLADDER_END_TIME"
# After the last snapshot: to end all ranks and to ask for the next start.
TIME_LIMIT_MARGIN_S = 10.0


def get_seconds_left() -> float:
    """Return the seconds until the batch job's time limit, infinity without one.

    Raises:
        InputError: The variable is no time.
    """
    text = os.environ.get(END_TIME_VARIABLE, "")
    if not text:
        return math.inf
    end = parse_whole_number(text)
    if end is None:
        raise InputError(
            f"{END_TIME_VARIABLE} is {text!r}, not seconds since 1970",
            f"unset {END_TIME_VARIABLE}, or date +%s -d TIME",
        )
    return end - time.time()


def drop_ignored_hangup(numbers: Iterable[int]) -> list[int]:
    """Return the signals without SIGHUP, if `nohup` has made this process ignore it."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in numbers if number != signal.SIGHUP or not is_ignored]


class StopSignals:
    """Handles SIGTERM, SIGHUP and Ctrl-C while it is open: the first one requests a stop.

    A second Ctrl-C interrupts as usual.
    """

    def __init__(self) -> None:
        # Whether a signal has come.
        self.stop_requested = False
        # Whether one more step could pass the batch job's time limit.
        self.late = False
        self._is_interrupted = False
        self._earlier_handlers: dict[int, Any] = {}
        # In seconds of time.perf_counter().
        self._end_time = time.perf_counter() + get_seconds_left()
        self._last_step_time = math.inf
        self._longest_step_s = 0.0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._earlier_handlers = {
                number: signal.signal(number, self._on_signal)
                for number in drop_ignored_hangup(TRAINING_STOP_SIGNALS)
            }
        return self

    def is_late(self, now: float) -> bool:
        """Tell whether one more step could pass the time limit.

        This is needed on a cluster that does not warn, or warns too late. The longest time between
        two calls, which includes snapshots, is what one more step may take; as long again is needed
        for the last snapshot.

        Args:
            now: The value of time.perf_counter(), in seconds, once per step.

        Returns:
            True if the job should save its last snapshot now. The value stays in `late`.
        """
        self._longest_step_s = max(self._longest_step_s, now - self._last_step_time)
        self._last_step_time = now
        needed_s = 2 * self._longest_step_s + TIME_LIMIT_MARGIN_S
        self.late = now + needed_s > self._end_time
        return self.late

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._is_interrupted:
                raise KeyboardInterrupt
            self._is_interrupted = True
        self.stop_requested = True

    def __exit__(self, *_: object) -> None:
        """Restore the handlers, or ignore the signals of a rank that stops.

        Its launcher forwards a signal that the batch system may have sent to the rank before.
        """
        ignores_signals = self.stop_requested and has_fd_store()
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, signal.SIG_IGN if ignores_signals else handler)


def parse_fail_at(text: str) -> tuple[int, int]:
    """Parse RANK:STEP, whose steps count from 1.

    Returns:
        The rank and the step.

    Raises:
        InputError: The text has another form.
    """
    rank_text, _, step_text = text.partition(":")
    rank = parse_whole_number(rank_text)
    step = parse_whole_number(step_text, 1)
    if rank is None or step is None:
        raise InputError(
            f"--fail-at {text!r} is not RANK:STEP", "--fail-at 1:20; steps count from 1"
        )
    return rank, step


def has_failed(run_dir: Path, rank: int, step: int) -> bool:
    """Tell whether `kill_once` has killed the rank in this step."""
    return _marker_path(run_dir, rank, step).exists()


def kill_once(run_dir: Path, rank: int, step: int) -> None:
    """Kill this process by SIGKILL, once per run directory, which a marker file records."""
    try:
        _marker_path(run_dir, rank, step).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _marker_path(run_dir: Path, rank: int, step: int) -> Path:
    return run_dir / f"failed-at-{rank}-{step}"
