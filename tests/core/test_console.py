"""Output to a terminal that its reader has closed."""

from __future__ import annotations

import os

from rich.progress import Progress

from stepladder.core.console import LossyStream
from stepladder.core.terminal import make_console


def test_a_library_that_writes_to_a_closed_terminal_is_not_ended() -> None:
    """What it has written is not written again at the interpreter's end, which changes the code."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        bar = Progress(console=make_console(file=LossyStream(terminal)))
        bar.add_task("steps", total=2)
        bar.start()
        os.close(ours)
        bar.update(bar.task_ids[0], completed=1)
        bar.refresh()
        bar.stop()
        terminal.flush()
