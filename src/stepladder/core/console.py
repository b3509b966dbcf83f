"""What is said to the person at the terminal, who may have left: nothing that is said can end a run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

CLEAR = "\x1b[K"  # to the end of a terminal's line


_bar: list[tuple[TextIO, str]] = []  # the progress bar that stands in a terminal's last line, if there is one


def draw_bar(text: str, terminal: TextIO) -> None:
    """Rewrite the terminal's last line, and no more than that: a longer text would leave its beginning behind."""
    if _bar != [(terminal, text)]:
        with suppress(OSError):
            columns = os.get_terminal_size(terminal.fileno()).columns or 80
            terminal.write(f"\r{text[: columns - 1]}{CLEAR}")
            terminal.flush()
            _bar[:] = [(terminal, text)]


def clear_bar() -> None:
    """Make room for a line. The bar is drawn again with its next word."""
    while _bar:
        with suppress(OSError):
            terminal, _ = _bar.pop()
            terminal.write(f"\r{CLEAR}")
            terminal.flush()


def say(text: str) -> None:
    """A line of a launcher, or several as they are."""
    show(f"stepladder: {text}" if "\n" not in text else text, sys.stderr)


def show(text: str, stream: TextIO | None) -> None:
    """A text and a line's end, in one piece: unbuffered, `print` writes them apart.

    stream: None where it was closed from the start. Where its reader has gone, what is still to come is dropped,
    or the interpreter would try again at its end, and change the exit code.
    """
    if stream is None:
        return
    clear_bar()
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_closed_streams() -> None:
    """Where stdin, stdout or stderr was closed, the next file would get its number, and all that is printed."""
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
