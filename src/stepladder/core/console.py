"""What a launcher says to the person at the terminal."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """A line, or several as they are. In one piece: unbuffered, `print` writes a line and its end apart."""
    sys.stderr.write(f"stepladder: {text}\n" if "\n" not in text else f"{text}\n")
    sys.stderr.flush()
