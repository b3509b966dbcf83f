"""What is said of a failure, and whether a restart would mend it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from stepladder.core.console import say
from stepladder.launcher.local.outcome import Exited, Failure, Mismatched, Raised

SECONDS_BETWEEN_FAULTS = 60.0  # a rank that fails twice within them will not recover


class Judge:
    """Shows failures, and tells a bug, which comes back, from a fault, which a restart mends.

    has_steps: a failure names its step, and a restart goes on from a snapshot. Else, for scripts,
    no bug can be told from a fault."""

    def __init__(self, has_steps: bool) -> None:
        self.has_steps = has_steps
        self.show: Callable[[Failure], None] = self._show
        self.shown: set[str] = set()
        self.step: int | None = None
        self.last_failure: dict[int | None, float] = {}

    def is_bug(self, failure: Failure) -> bool:
        """Show the failure, and say whether a restart would be in vain."""
        self.show(failure)
        why, self.step = (
            self.why_in_vain(failure),
            failure.error.step if isinstance(failure, Raised) else None,
        )
        if why:
            say(why)
        return bool(why)

    def why_in_vain(self, failure: Failure) -> str:
        """Why a restart would not help, or "". An exception is a fault, once: at the same step
        again, or before the first step, it is a bug."""
        if not self.has_steps:
            return ""
        if isinstance(failure, Exited) and failure.on_purpose:
            return "not restarted: the job has ended itself, by sys.exit()"
        if isinstance(failure, Mismatched):
            return "not restarted: the code is wrong, and the ranks would differ again"
        if not isinstance(failure, Raised) or failure.error.step not in (None, self.step):
            return ""
        if failure.error.step is None:
            return "not restarted"
        again = "a bug, not a fault" if failure.error.is_about_code else "not restarted"
        return f"{again}: the same step failed twice"

    def _show(self, failure: Failure) -> None:
        say(failure.text)
        if (
            isinstance(failure, Raised)
            and failure.error.is_about_code
            and failure.error.trace not in self.shown
        ):
            self.shown.add(failure.error.trace)
            lines = failure.error.trace.splitlines()
            say("".join(f"  [rank {failure.rank}] {line}\n" for line in lines).rstrip())
        if failure.cause:
            say(failure.cause)

    def failed_again(self, rank: int | None) -> bool:
        """Whether this rank's failure before is not long ago."""
        now, before = time.monotonic(), self.last_failure.get(rank, -math.inf)
        self.last_failure[rank] = now
        if rank is None or now - before > SECONDS_BETWEEN_FAULTS:
            return False
        self.last_failure.clear()
        return True
