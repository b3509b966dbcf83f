"""Output to a terminal: long lines are wrapped, and its reader may have closed it."""

from __future__ import annotations

import os
import termios

import pytest
from rich.progress import Progress

from stepladder.core.console import LossyStream, write_text
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


LONG = "error: recipe 'digitz' is unknown; there are digits, gpt, mlp. HINT: did you mean digits?"


@pytest.mark.parametrize(
    ("text", "end", "shown"),
    [
        (
            LONG,
            "\n",
            "error: recipe 'digitz' is unknown; there\n  are digits, gpt, mlp.\n"
            "  HINT: did you mean digits?\n",
        ),
        ("  do: a b " + "c" * 50, "\n", f"  do: a b\n    {'c' * 50}\n"),
        (f"    {LONG}", "\n", f"    {LONG}\n"),  # code
        (f"{LONG}\n", "", f"{LONG}\n"),  # a file
    ],
)
def test_a_terminal_breaks_no_word(text: str, end: str, shown: str) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 40))
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb") as reader:
        write_text(text, terminal, end)
        expected = shown.replace("\n", "\r\n").encode()
        assert reader.read(len(expected)) == expected
