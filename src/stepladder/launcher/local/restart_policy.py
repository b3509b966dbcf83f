"""The decision whether a failure is permanent, so that a restart would not help."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from stepladder.core.console import print_message
from stepladder.launcher.local.outcome import Exited, Failure, Mismatched, Raised

REPEATED_FAILURE_WINDOW_S = 60.0  # a rank that fails twice within it will not recover


class RestartPolicy:
    """Reports failures, and tells a permanent failure from a fault that a restart overcomes.

    Args:
        has_steps: Whether a failure names its step and a restart resumes from a snapshot. A script
            has neither, so that none of its failures is known to be permanent.
        report: What is called with each failure; None prints it.
    """

    def __init__(self, has_steps: bool, report: Callable[[Failure], None] | None = None) -> None:
        self.has_steps = has_steps
        self.report: Callable[[Failure], None] = report or self._print
        self._printed_traces: set[str] = set()
        self._failed_step: int | None = None
        self._failure_times: dict[int | None, float] = {}

    def note_failed_step(self, step: int | None) -> None:
        """Remember the step of the last failure: the same step failing again is a bug."""
        self._failed_step = step

    def record_failure(self, failure: Failure) -> bool:
        """Report a failure, and return whether it is permanent."""
        self.report(failure)
        reason = self.reason_not_to_restart(failure)
        self._failed_step = None
        if isinstance(failure, Raised):
            self._failed_step = failure.error.step
        if reason:
            print_message(reason)
        return bool(reason)

    def is_permanent(self, failure: Failure) -> bool:
        """Return whether a restart would fail in the same way."""
        return bool(self.reason_not_to_restart(failure))

    def reason_not_to_restart(self, failure: Failure) -> str:
        """Return why a failure is permanent, or "" if a restart may help.

        An exception is permanent if it came before the first step, or in the step in which the last
        one came. Otherwise it counts as a fault.
        """
        if not self.has_steps:
            return ""
        if isinstance(failure, Exited) and failure.is_sys_exit:
            return "not restarted: the job has ended itself, by sys.exit()"
        if isinstance(failure, Mismatched):
            return "not restarted: the code is wrong, and the ranks would differ again"
        if not isinstance(failure, Raised):
            return ""
        step = failure.error.step
        if step is None:
            return "not restarted"
        if step != self._failed_step:
            return ""
        verdict = "a bug, not a fault" if failure.error.has_useful_traceback else "not restarted"
        return f"{verdict}: the same step failed twice"

    def is_repeated_failure(self, rank: int | None) -> bool:
        """Record that a rank failed now, and return whether it also failed a short time ago.

        Args:
            rank: The rank; None if the failure is of no single rank.

        Returns:
            True if the rank's previous failure lies at most REPEATED_FAILURE_WINDOW_S seconds back.
            Then the failures of all ranks are forgotten.
        """
        now = time.monotonic()
        previous = self._failure_times.get(rank, -math.inf)
        self._failure_times[rank] = now
        if rank is None or now - previous > REPEATED_FAILURE_WINDOW_S:
            return False
        self._failure_times.clear()
        return True

    def _print(self, failure: Failure) -> None:
        print_message(failure.text)
        if isinstance(failure, Raised):
            self._print_trace_once(failure)
        if failure.cause:
            print_message(failure.cause)

    def _print_trace_once(self, failure: Raised) -> None:
        trace = failure.error.trace
        if not failure.error.has_useful_traceback or trace in self._printed_traces:
            return
        self._printed_traces.add(trace)
        lines = [f"  [rank {failure.rank}] {line}" for line in trace.splitlines()]
        print_message("\n".join(lines).rstrip())
