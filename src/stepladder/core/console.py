"""What is said to the person at the terminal, who may have left: nothing that is said can end a
run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import TextIO

# Of a job's output, all that a terminal obeys but colours, tabs and ends of lines.
OBEYED_IN_LOGS = re.compile(
    rb"\x1b(?!\[[\d;]*m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
)

CLEAR = "\x1b[K"  # to the end of a terminal's line


_bar: list[
    tuple[TextIO, str]
] = []  # the progress bar that stands in a terminal's last line, if there is one


def draw_bar(text: str, terminal: TextIO) -> None:
    """Rewrite the terminal's last line, and no more than that: a longer text would leave its
    beginning behind.
    """
    if _bar != [(terminal, text)]:
        with suppress(OSError):
            columns = os.get_terminal_size(terminal.fileno()).columns or 80
            _put(f"\r{text[: columns - 1]}{CLEAR}", terminal)
            _bar[:] = [(terminal, text)]


def clear_bar() -> None:
    """Make room for a line. The bar is drawn again with its next word."""
    while _bar:
        terminal, _ = _bar.pop()
        _put(f"\r{CLEAR}", terminal)


def _put(text: str, stream: TextIO) -> None:
    """At once. Where its reader has gone, what is still to come is dropped, or the interpreter
    would try again at its end, and change the exit code."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_terminal(stream: TextIO | None) -> bool:
    """False also of what a job has closed, or put in a stream's place."""
    with suppress(OSError, ValueError, AttributeError):
        return stream is not None and stream.isatty()
    return False


def say(text: str) -> None:
    """A line of a launcher, or several as they are."""
    show(f"stepladder: {text}" if "\n" not in text else text, sys.stderr)


def echo(text: str, err: bool = False, end: str = "\n") -> None:
    """For commands: to stdout, or stderr. Whatever the text holds, it is only shown."""
    show(text, sys.stderr if err else sys.stdout, end)


def printable(text: str, kept: str = "\n\t") -> str:
    """With \\x1b and the like in place of what a terminal would obey: files and names come from
    others too.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in kept else ascii(one)[1:-1] for one in text)


def printable_log(text: bytes) -> bytes:
    """The same of what a job has printed; its colours and carriage returns stay."""
    return OBEYED_IN_LOGS.sub(lambda found: repr(found[0])[2:-1].encode(), text)


def show(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """A text and a line's end, in one piece: unbuffered, `print` writes them apart.

    stream: None where it was closed from the start; a job may close it.
    """
    if stream is None or getattr(stream, "closed", False):
        return
    clear_bar()
    _put(f"{printable(text)}{end}", stream)


def mend_streams() -> None:
    """Streams that every text can be written to.

    For what stdout's encoding cannot write, as in an ASCII locale, stands \\xe9, as it does on
    stderr."""
    open_streams()
    with suppress(OSError):  # of a pipe that something was written to already
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")


def open_streams() -> None:
    """Where stdin, stdout or stderr is closed, the next file would get its number, and all that is
    printed.
    """
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)


@contextmanager
def streams_kept() -> Iterator[None]:
    """What a job's code in the block closes of stdin, stdout and stderr is open again at its end:
    else the next file, such as the run's lock, gets its number, and all that is printed."""
    kept = [(number, os.dup(number)) for number in range(3)]
    try:
        yield
    finally:
        for number, copy in kept:
            try:
                os.fstat(number)
            except OSError:
                os.dup2(copy, number)
            os.close(copy)
