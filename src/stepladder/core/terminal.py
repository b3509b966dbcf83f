"""rich's console, as every command and the trainer make it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from stepladder.core.numbers import whole

if TYPE_CHECKING:
    from rich.console import Console

MOST_COLUMNS = 10_000  # of a terminal, and lines


def rich_console(**more: Any) -> Console:
    """rich's, with these arguments. By itself it takes all of Unicode's digits in COLUMNS and
    LINES.
    """
    from rich.console import Console  # late: most commands print no table

    odd = [
        name
        for name in ("COLUMNS", "LINES")
        if not whole(os.environ.get(name, ""), 1, MOST_COLUMNS)
    ]
    return Console(
        _environ={name: value for name, value in os.environ.items() if name not in odd}, **more
    )
