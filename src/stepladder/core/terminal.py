"""rich's console, as every command and the trainer make it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from stepladder.core.numbers import parse_whole_number

if TYPE_CHECKING:
    from rich.console import Console

MAX_COLUMNS = 10_000  # of a terminal, and the most lines


def make_console(**options: Any) -> Console:
    """Return a rich console with these options.

    By itself rich accepts every digit of Unicode in COLUMNS and LINES, and then fails.
    """
    from rich.console import Console  # late: most commands print no table

    env = dict(os.environ)
    for name in ("COLUMNS", "LINES"):
        if not parse_whole_number(env.get(name, ""), 1, MAX_COLUMNS):
            env.pop(name, None)
    return Console(_environ=env, **options)
