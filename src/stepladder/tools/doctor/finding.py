"""The texts of the rules about machines, and the form of a rule.

Rules examine nothing but the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stepladder.tools.doctor.machine_facts import Facts
from stepladder.tools.findings.finding import Catalogue, Finding

MACHINE_TEXTS = Catalogue("stepladder.tools.doctor")

Findings = Iterator[Finding]
# A rule yields findings, or returns a true value where its one finding applies.
Rule = Callable[[Facts], Any]


def problem(rule: str, facts: object, **values: Any) -> Finding:
    """Return the finding of a rule, or of `rule.case`, with facts and values in its texts."""
    return MACHINE_TEXTS.finding(rule, values={"f": facts, **values})
