"""What is said to the person at the terminal, who may have left: nothing that is said can end a run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


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
