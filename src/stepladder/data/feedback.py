"""What a person hears of something that takes long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Feedback:
    """Silent unless told otherwise. progress: a name, how much is done, and how much there is.  say: a line."""

    progress: Callable[[str, int, int], None] = lambda name, done, total: None
    say: Callable[[str], None] = lambda line: None
