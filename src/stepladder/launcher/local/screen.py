"""What a rank prints, as lines. A progress bar rewrites its line, which a terminal may do; in a log
it may not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

SECONDS_BETWEEN_BARS = 10.0  # of a log
LONGEST_LINE = 1 << 16  # bytes; what has no end by then is shown in parts
UP = b"\x1b[A"  # how tqdm comes back from an inner bar, which stands a line lower
TOKENS = re.compile(rb"\r|\n|\x1b\[A|(?:(?!\x1b\[A)[^\r\n])+")
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Row:
    """A line that may have no end yet. is_bar: it has been rewritten.  shown: what the reader has
    of a bar.

    at_start: a carriage return has come, so what follows is in its place.  cleared: by blanks.
    """

    text: bytes = b""
    at_start: bool = False
    cleared: bool = False
    is_bar: bool = False
    shown: bytes = b""

    def go_back(self) -> None:
        """The carriage return after what cleared the row belongs to that: a plain line may follow."""
        self.at_start, self.cleared = not self.cleared, False

    def add(self, text: bytes) -> None:
        self.cleared = self.at_start and not ESCAPES.sub(b"", text).strip()
        if self.cleared:
            self.text, self.is_bar = b"", False
        elif self.at_start:
            self.text, self.is_bar = text, True
        else:
            self.text += text
        self.at_start = False


class Screen:
    """One stream, as a terminal would have it. live: the bar that was drawn last, b"" where there
    is none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.told = clock, 0.0
        self._reset()

    def _reset(self) -> None:
        self.rows, self.cursor, self.live = [Row()], 0, b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end with it. Those of bars come with the next line that is none, or as
        `due`.
        """
        lines: list[bytes] = []
        for token in TOKENS.findall(data):
            row = self.rows[self.cursor]
            if token == b"\r":
                row.go_back()
            elif token == UP:
                self.cursor = max(0, self.cursor - 1)
            elif token == b"\n" and row.is_bar:
                self.cursor += 1
                self.rows += [Row()] * (self.cursor == len(self.rows))
            elif token != b"\n":
                self._draw(row, token)
            if (token == b"\n" and not row.is_bar) or len(row.text) > LONGEST_LINE:
                lines += [*self._bars(), row.text + b"\n"]
                self._reset()
        return lines

    def _draw(self, row: Row, text: bytes) -> None:
        if not any(one.is_bar for one in self.rows):
            self.told = self.clock()
        row.add(text)
        self.live = row.text.rstrip() if row.is_bar else b""

    def due(self, all_bars: bool) -> list[bytes]:
        """Bars that have changed since they were shown, once in a while. all_bars: also those under
        way.
        """
        if self.clock() - self.told < SECONDS_BETWEEN_BARS:
            return []
        lines, self.told = self._bars(len(self.rows) if all_bars else self.cursor), self.clock()
        del self.rows[: self.cursor]  # they are done
        self.cursor = 0
        return lines

    def end(self) -> list[bytes]:
        """What is left when there will be no more."""
        rest = [row.text + b"\n" for row in self.rows if row.text and not row.is_bar]
        lines = [*self._bars(), *rest]
        self._reset()
        return lines

    def _bars(self, count: int | None = None) -> list[bytes]:
        changed = [row for row in self.rows[:count] if row.is_bar and row.text != row.shown]
        for row in changed:
            row.shown = row.text
        return [row.text.rstrip() + b"\n" for row in changed]
