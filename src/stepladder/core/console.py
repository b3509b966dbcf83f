"""Output for the person at the terminal, who may have left: no output can end a run."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from threading import Timer
from typing import Any, TextIO

# Everything in a job's output that a terminal obeys, except colours, tabs and line ends.
CONTROL_BYTES = re.compile(
    rb"\x1b(?!\[[\d;]*m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
)

CLEAR_LINE = "\x1b[K"  # to the end of a terminal's line
CODE_INDENT = " " * 4
DEFAULT_COLUMNS = 80
SLOW_S = 5.0
STANDARD_STREAMS = range(3)  # the file descriptors of stdin, stdout and stderr

# The progress bar in a terminal's last line, if there is one.
_bar: list[tuple[TextIO, str]] = []


def draw_bar(text: str, terminal: TextIO) -> None:
    """Replace the terminal's last line by a progress bar, cut to the terminal's width."""
    if _bar == [(terminal, text)]:
        return
    with suppress(OSError):
        columns = _count_columns(terminal)
        _write(f"\r{text[: columns - 1]}{CLEAR_LINE}", terminal)
        _bar[:] = [(terminal, text)]


def clear_bar() -> None:
    """Remove the progress bar, to make room for a line; the next `draw_bar` brings it back."""
    while _bar:
        terminal, _ = _bar.pop()
        _write(f"\r{CLEAR_LINE}", terminal)


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether a stream is a terminal; False if a job has closed or replaced it."""
    with suppress(OSError, ValueError, AttributeError):
        return stream is not None and stream.isatty()
    return False


def print_message(text: str) -> None:
    """Print to stderr: one line after the program's name, or several lines as they are."""
    if "\n" not in text:
        text = f"stepladder: {text}"
    write_text(text, sys.stderr)


@contextmanager
def tell_if_slow(text: str) -> Iterator[None]:
    """Print a message if the block has not ended after SLOW_S, so that nobody waits without one."""
    timer = Timer(SLOW_S, print_message, [text])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def echo(text: str, err: bool = False, end: str = "\n") -> None:
    """Print a command's result to stdout, or to stderr, with control characters escaped."""
    write_text(text, sys.stderr if err else sys.stdout, end)


def echo_json(facts: Mapping[str, Any]) -> None:
    """Print the result of --json: an object on one line, whose form has a number."""
    echo(json.dumps({"schema": 1, **facts}) + "\n", end="")


def write_text(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Write a text and its line end in one call; `print` would make two on an unbuffered stream.

    Args:
        text: What to write; control characters are escaped.
        stream: Where to write; None, or a closed stream, is ignored.
        end: What follows the text; without it the text is that of a file, and is not wrapped.
    """
    if stream is None or getattr(stream, "closed", False):
        return
    clear_bar()
    text = make_printable(text)
    if end:
        text = wrap_lines(text, stream)
    _write(f"{text}{end}", stream)


def wrap_lines(text: str, stream: TextIO) -> str:
    """Return the text with line breaks between words where a terminal's lines would end.

    A HINT then begins a line, and lines that go on are indented. Lines with an indent of
    CODE_INDENT are code, and stay.
    """
    if not is_terminal(stream):
        return text
    columns = _count_columns(stream)
    lines = []
    for line in text.split("\n"):
        if len(line) <= columns or line.startswith(CODE_INDENT):
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())] + "  "
        for part in line.replace(" HINT: ", f"\n{indent}HINT: ").split("\n"):
            lines += textwrap.wrap(
                part,
                columns,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _count_columns(terminal: TextIO) -> int:
    """Return the length of a terminal's lines."""
    with suppress(OSError):
        return os.get_terminal_size(terminal.fileno()).columns or DEFAULT_COLUMNS
    return DEFAULT_COLUMNS


class LossyStream:
    """A stream for a library that writes itself: what the stream does not accept is lost.

    Its other attributes are those of the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        _write(text, self._stream)
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write flushes."""


def make_printable(text: str, allowed: str = "\n\t") -> str:
    """Return the text with its control characters escaped, as Python's repr does.

    Names and files may come from other people.

    Args:
        text: The text.
        allowed: Control characters that stay.
    """
    if text.isprintable():
        return text
    characters = []
    for character in text:
        is_allowed = character.isprintable() or character in allowed
        characters.append(character if is_allowed else ascii(character)[1:-1])
    return "".join(characters)


def make_log_printable(text: bytes) -> bytes:
    """Escape control bytes in the output of a job; colours and carriage returns stay."""

    def escape(match: re.Match[bytes]) -> bytes:
        return repr(match[0])[2:-1].encode()

    return CONTROL_BYTES.sub(escape, text)


def prepare_streams() -> None:
    """Make stdout, stderr and stdin streams to which every text can be written.

    Characters that stdout's encoding cannot represent, as in an ASCII locale, are escaped, as on
    stderr.
    """
    _open_closed_streams()
    with suppress(OSError):  # a pipe to which something was written already
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")


def _open_closed_streams() -> None:
    """Open /dev/null as stdin, stdout or stderr where it is closed.

    Otherwise the next file would get its number, and everything that is printed.
    """
    for number in STANDARD_STREAMS:
        if not _is_open(number):
            os.open(os.devnull, os.O_RDWR)


@contextmanager
def preserve_streams() -> Iterator[None]:
    """Reopen at the end of the block what a job's code has closed of stdin, stdout and stderr.

    Otherwise the next file, such as the run's lock, would get its number, and everything that is
    printed.
    """
    copies = [(number, os.dup(number)) for number in STANDARD_STREAMS]
    try:
        yield
    finally:
        for number, copy in copies:
            if not _is_open(number):
                os.dup2(copy, number)
            os.close(copy)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _write(text: str, stream: TextIO) -> None:
    """Write and flush. If the reader has gone, later output goes to /dev/null.

    Otherwise the interpreter would write it again when it ends, and change the exit code.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
