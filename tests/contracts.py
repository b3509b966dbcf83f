"""One resume contract for everything with state: stop, resume, and the end is that of an unbroken
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Resumable(Protocol):
    """Something that makes steps, and can be stopped and built anew in between."""

    def advance(self, until: int) -> None:
        """Build everything anew, resume from what was kept, and go on to step `until`."""

    def outcome(self) -> Any:
        """All that must not depend on where it was stopped; compared with ==."""


def check_resume(make: Callable[[str], Resumable], steps: int, stop_at: Iterable[int]) -> None:
    """For each place to stop: stopped there and resumed, the outcome after `steps` is that of an
    unbroken run.

    make: called with a name that differs for each run. stop_at: should hold every step of two
    epochs."""
    unbroken = make("unbroken")
    unbroken.advance(steps)
    expected = unbroken.outcome()
    for stop in stop_at:
        broken = make(f"stopped-at-{stop}")
        broken.advance(stop)
        broken.advance(steps)
        assert broken.outcome() == expected, (
            f"another outcome when stopped at step {stop} of {steps}"
        )


def check_resume_twice(
    make: Callable[[str], Resumable], steps: int, first: int, second: int
) -> None:
    """As `check_resume`, stopped two times in one run."""
    unbroken = make("unbroken-again")
    broken = make("stopped-twice")
    unbroken.advance(steps)
    for until in (first, second, steps):
        broken.advance(until)
    assert broken.outcome() == unbroken.outcome()
