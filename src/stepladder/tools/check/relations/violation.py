"""A violated relation: where, and how far."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepladder.tools.probe.events import CodeLine

SAME_RATIO = 0.02  # the relative difference of ratios that are the same


@dataclass(frozen=True)
class Violation:
    """The first violation of a relation at one line.

    Args:
        relation: Its name, such as `shown-numbers`.
        line: The line of the user's code.
        certainty: How often the difference is larger than what is allowed.
        evidence: What was seen, in words.
        ratio: How many times the value of one process that of several is; nan if it is no multiple.
    """

    relation: str
    line: CodeLine | None
    certainty: float
    evidence: str
    ratio: float = math.nan
