"""The hook that records lists which the script numbers before it trains.

For example `{film: row for row, film in enumerate(films)}`.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from typing import Any

import xxhash

from stepladder.tools.check.events import Numbering
from stepladder.tools.check.probe.hooks_data import pass_counters
from stepladder.tools.check.probe.patching import default_on_error
from stepladder.tools.check.probe.probe_log import current_log, record

MAX_NUMBERINGS = 200
MAX_VALUES = 200  # that are recorded of each
MAX_NUMBERED_VALUES = 1_000_000


class NumberingCounter:
    """Counts the numberings that were recorded."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


numberings = NumberingCounter()


def attach() -> None:
    builtins.enumerate = RecordingEnumerate  # type: ignore[misc]


class RecordingEnumerate(enumerate):  # type: ignore[type-arg]
    """An `enumerate` that records the values of lists before the first pass over a loader."""

    def __new__(cls, iterable: Iterable[Any], start: int = 0) -> RecordingEnumerate:
        is_early = numberings.count < MAX_NUMBERINGS and pass_counters.passes == 0
        if is_early and current_log().is_called_by_user():
            record_numbering(iterable)
        return super().__new__(cls, iterable, start)


@default_on_error(lambda: None)
def record_numbering(values: Any) -> None:
    if not isinstance(values, list | tuple | set | frozenset | dict):
        return
    if not 1 < len(values) <= MAX_NUMBERED_VALUES:
        return
    numberings.add()
    first_values = list(values)[:MAX_VALUES]
    shown = [repr(value)[:60] for value in first_values if isinstance(value, str | int)]
    if len(shown) == len(first_values):
        digest = xxhash.xxh3_64_hexdigest(repr(list(values)).encode())
        numbering = Numbering(values=shown, count=len(values), digest=digest)
        record(numbering)
