"""Lists that the script numbers before it trains: `{film: row for row, film in enumerate(films)}`."""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from typing import Any

import xxhash

from stepladder.tools.check.probe.hooks_data import Counts
from stepladder.tools.check.probe.patching import careful
from stepladder.tools.check.probe.recorder import here

MOST_CALLS, MOST_VALUES, LONGEST = 200, 200, 1_000_000
calls = 0


def attach() -> None:
    builtins.enumerate = Numbered  # type: ignore[misc]


class Numbered(enumerate):  # type: ignore[type-arg]
    """`enumerate`, which says what it is given."""

    def __new__(cls, iterable: Iterable[Any], start: int = 0) -> Numbered:
        if calls < MOST_CALLS and Counts.passes == 0 and here().direct():
            note(iterable)
        return super().__new__(cls, iterable, start)


@careful(lambda: None)
def note(values: Any) -> None:
    global calls
    if (
        not isinstance(values, (list, tuple, set, frozenset, dict))
        or not 1 < len(values) <= LONGEST
    ):
        return
    calls += 1
    shown = [
        repr(value)[:60] for value in list(values)[:MOST_VALUES] if isinstance(value, (str, int))
    ]
    if len(shown) == min(len(values), MOST_VALUES):
        digest = xxhash.xxh3_64_hexdigest(repr(list(values)))
        here().at("numbered", values=shown, count=len(values), digest=digest)
