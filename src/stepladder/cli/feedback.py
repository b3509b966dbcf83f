"""How a person sees what `stepladder data` is doing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from stepladder.data.disk import Feedback


@contextmanager
def on_stderr() -> Iterator[Feedback]:
    """Bars on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield Feedback(say=partial(click.echo, err=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield Feedback(advance, partial(bars.console.print, markup=False, highlight=False, soft_wrap=True))
