"""A violated relation: where, and by which facts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepladder.tools.probe.events import CodeLine


@dataclass(frozen=True)
class Violation:
    """The first violation of a relation at one line.

    Args:
        relation: Its name, such as `shown-numbers`.
        line: The line of the user's code.
        certainty: How often the difference is larger than what is allowed.
        facts: What is known of it, by name; explanations are chosen by these.
        evidence: What was seen, in words.
    """

    relation: str
    line: CodeLine | None
    certainty: float
    evidence: str
    facts: dict[str, Any] = field(default_factory=dict)
