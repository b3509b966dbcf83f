"""Whole numbers that people and batch systems write, read in one place."""

from __future__ import annotations

MOST = 2**53  # what a double and JSON hold exactly
MOST_PORT = 65535


def whole(text: str, least: int = 0, most: int = MOST) -> int | None:
    """The number that `text` is, in ASCII digits alone; None where it is none, or not from `least` to `most`.

    Neither str.isdigit nor int would do: the one is true of a raised 2, which the other refuses, and int takes
    underscores, spaces and thousands of digits.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MOST))):
        return None
    return int(text) if least <= int(text) <= most else None
