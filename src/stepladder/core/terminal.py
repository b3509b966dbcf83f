"""rich's console, as every command and the trainer make it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepladder.core.numbers import parse_whole_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DEFAULT_COLUMNS = 80
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


def get_table_width() -> int:
    """Return the number of columns for a table: 80 where the output is not a terminal."""
    console = make_console()
    return console.width if console.is_terminal else DEFAULT_COLUMNS


def make_column_tables(
    title: str,
    corner: str,
    row_names: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    width: int,
) -> Iterator[Table]:
    """Yield tables with one row per name and, in each table, as many columns as fit the width.

    No cell is cut or folded. Columns that do not fit are in the next table.

    Args:
        title: The title, above the first table.
        corner: The heading of the row names.
        row_names: The first cell of each row.
        columns: The cells of each column, by its heading.
        width: Number of characters in a line.
    """
    from rich.table import Table  # late: most commands print no table

    frame = 3  # between two columns, and a column's two spaces
    names_width = max(map(len, [corner, *row_names])) + frame + 1
    remaining = list(columns.items())
    while remaining:
        table = Table(title=title)
        title = ""
        table.add_column(corner, no_wrap=True)
        shown: list[Sequence[str]] = []
        free = width - names_width
        while remaining:
            heading, cells = remaining[0]
            needed = max(map(len, [heading, *cells])) + frame
            if shown and needed > free:
                break
            free -= needed
            table.add_column(heading, justify="right", no_wrap=True)
            shown.append(cells)
            del remaining[0]
        for name, *cells in zip(row_names, *shown, strict=True):
            table.add_row(name, *cells)
        yield table
