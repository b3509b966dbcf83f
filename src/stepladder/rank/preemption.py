"""What ends a rank's work early: a request to stop, or the failure that `--fail-at` causes.

A signal only sets a flag; the loop reads it at a step's end, and all ranks stop together.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from stepladder.core.arguments import validate_arguments
from stepladder.core.errors import InputError
from stepladder.core.numbers import parse_whole_number
from stepladder.rank.fd_store import has_fd_store
from stepladder.rank.torch_fixes import find_collective_device

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
    """Stops a training loop at a step's end, on all ranks together, when the cluster asks for it.

    The loop is in its `with` block. While that is open, the first SIGTERM, SIGHUP or Ctrl-C only
    requests a stop; a second Ctrl-C interrupts as usual. Where `agreed()` is true after a step, the
    script saves, and ends with sys.exit(75), after which `stepladder submit` requeues the job.

    Args:
        every: In how many calls of `agreed` the ranks exchange once whether to stop.
        signals: The signals that request a stop; None for the three. SIGTERM is what Slurm sends
            before a preemption, and, in a job of `stepladder submit`, before the time limit.
    """

    @validate_arguments
    def __init__(self, every: int = 1, signals: Sequence[int] | None = None) -> None:
        if every < 1:
            raise InputError(f"StopSignals(every={every}) never asks the ranks", "every=1, or more")
        self.every = every
        self.signals = signals or TRAINING_STOP_SIGNALS
        # Whether a signal has come.
        self.stop_requested = False
        # Whether one more step could pass the batch job's time limit.
        self.late = False
        self._is_interrupted = False
        self._num_calls = 0
        self._is_agreed = False
        self._earlier_handlers: dict[int, Any] = {}
        # In seconds of time.perf_counter().
        self._end_time = time.perf_counter() + get_seconds_left()
        self._last_step_time = math.inf
        self._longest_step_s = 0.0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._earlier_handlers = {
                number: signal.signal(number, self._on_signal)
                for number in drop_ignored_hangup(self.signals)
            }
        return self

    def agreed(self) -> bool:
        """Tell whether all ranks stop now. Each rank calls it once per step, as a collective.

        Ranks get a signal in different steps, or not at all; the answer is that of all of them
        together, from one all-reduce of one number. A process without a process group decides
        alone.

        Returns:
            True, on all ranks in the same call, if one of them was asked to stop, or if the steps
            up to the next exchange could pass the batch job's time limit.
        """
        self._num_calls += 1
        if not self._is_agreed and self._num_calls % self.every == 0:
            self.is_late(time.perf_counter())
            self._is_agreed = _is_true_on_any_rank(self.stop_requested or self.late)
        return self._is_agreed

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

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Restore the handlers, or ignore the signals of a rank that stops.

        Its launcher forwards a signal that the batch system may have sent to the rank before.
        """
        is_ending = has_fd_store() or isinstance(error, SystemExit)
        ignores_signals = (self.stop_requested or self._is_agreed) and is_ending
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, signal.SIG_IGN if ignores_signals else handler)


def _is_true_on_any_rank(value: bool) -> bool:
    """Return whether the value is true on a rank of the process group, if there is one."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return value
    import torch

    count = torch.tensor(float(value), device=find_collective_device())
    dist.all_reduce(count)
    return count.item() > 0


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
