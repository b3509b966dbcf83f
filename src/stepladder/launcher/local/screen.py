"""Turns the output of a rank into lines.

A progress bar rewrites its line, which is possible on a terminal but not in a log.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

BAR_INTERVAL_S = 10.0  # of a bar's lines in a log
MAX_LINE_BYTES = 1 << 16  # a longer line is shown in parts
CURSOR_UP = b"\x1b[A"  # tqdm returns with it from an inner bar, which is one row below
TOKEN_PATTERN = re.compile(rb"\r|\n|\x1b\[A|(?:(?!\x1b\[A)[^\r\n])+")
ESCAPE_PATTERN = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class _Row:
    """One row of the screen, which may not be complete yet."""

    def __init__(self) -> None:
        self.text = b""
        self.is_bar = False  # whether the row was rewritten
        self._is_at_start = False  # after a carriage return: what follows replaces the row
        self._is_cleared = False  # by blanks
        self._shown = b""  # what the reader has seen of a bar

    def return_carriage(self) -> None:
        """Move to the start of the row.

        The carriage return after the blanks that clear a row belongs to them: a plain line may
        follow.
        """
        self._is_at_start = not self._is_cleared
        self._is_cleared = False

    def write(self, text: bytes) -> None:
        """Add text at the cursor."""
        is_blank = not ESCAPE_PATTERN.sub(b"", text).strip()
        self._is_cleared = self._is_at_start and is_blank
        if self._is_cleared:
            self.text = b""
            self.is_bar = False
        elif self._is_at_start:
            self.text = text
            self.is_bar = True
        else:
            self.text += text
        self._is_at_start = False

    def take_changed_bar(self) -> bytes | None:
        """Return the line of a bar that has changed since it was last shown, or None."""
        if not self.is_bar or self.text == self._shown:
            return None
        self._shown = self.text
        return self.text.rstrip() + b"\n"


class Screen:
    """One stream, as a terminal would show it.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # The bar that was drawn last; b"" if there is none.
        self.live = b""
        self._clock = clock
        self._bars_shown_at = 0.0
        self._rows = [_Row()]
        self._cursor = 0

    def _clear(self) -> None:
        self._rows = [_Row()]
        self._cursor = 0
        self.live = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that end in the data.

        Bars are returned with the next plain line, or by `take_due_bars`.
        """
        lines: list[bytes] = []
        for token in TOKEN_PATTERN.findall(data):
            row = self._rows[self._cursor]
            if token == b"\r":
                row.return_carriage()
            elif token == CURSOR_UP:
                self._cursor = max(0, self._cursor - 1)
            elif token == b"\n" and row.is_bar:
                self._move_down()
            elif token != b"\n":
                self._write(row, token)
            is_line_end = token == b"\n" and not row.is_bar
            if is_line_end or len(row.text) > MAX_LINE_BYTES:
                lines += [*self._take_bars(), row.text + b"\n"]
                self._clear()
        return lines

    def _move_down(self) -> None:
        self._cursor += 1
        if self._cursor == len(self._rows):
            self._rows.append(_Row())

    def _write(self, row: _Row, text: bytes) -> None:
        if not any(row.is_bar for row in self._rows):
            self._bars_shown_at = self._clock()
        row.write(text)
        self.live = row.text.rstrip() if row.is_bar else b""

    def take_due_bars(self, with_live: bool) -> list[bytes]:
        """Return the bars that have changed, once in BAR_INTERVAL_S.

        Args:
            with_live: Whether to return the bars that still change, too.
        """
        now = self._clock()
        if now - self._bars_shown_at < BAR_INTERVAL_S:
            return []
        self._bars_shown_at = now
        lines = self._take_bars(None if with_live else self._cursor)
        del self._rows[: self._cursor]  # they are complete
        self._cursor = 0
        return lines

    def end(self) -> list[bytes]:
        """Return the remaining lines when the stream has ended."""
        incomplete = [row.text + b"\n" for row in self._rows if row.text and not row.is_bar]
        lines = [*self._take_bars(), *incomplete]
        self._clear()
        return lines

    def _take_bars(self, row_count: int | None = None) -> list[bytes]:
        """Return the changed bars of the first rows, or of all rows."""
        lines = [row.take_changed_bar() for row in self._rows[:row_count]]
        return [line for line in lines if line is not None]
