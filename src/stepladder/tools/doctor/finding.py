"""Findings about a machine, and functions that make rules of one form.

Rules examine nothing but the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from stepladder.tools.doctor.machine_facts import Facts

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

CLOCKS_DIFFER = (  # cause and fix
    "heartbeats of nodes are compared by clock: beyond 3 s a living node looks lost",
    "chronyc tracking, or systemctl restart systemd-timesyncd, on all nodes",
)


@dataclass(frozen=True)
class MachineFinding:
    """A problem of a machine.

    Attributes:
        severity: How serious it is.
        found: What was found.
        cause: Why that is, or why it matters.
        fix: What to type.
        rule: The name of the rule.
    """

    severity: Severity
    found: str
    cause: str
    fix: str
    rule: str = ""


Findings = Iterator[MachineFinding]
Rule = Callable[[Facts], Findings]
error, warning, note = (partial(MachineFinding, severity) for severity in SEVERITIES)


def one_finding(
    severity: Severity, condition: Callable[[Facts], Any], found: str, cause: str, fix: str
) -> Rule:
    """Return a rule that has one finding where a condition gives a true value.

    Args:
        severity: The severity of the finding.
        condition: A function of the facts.
        found: What was found; in this and the next texts {0} is the value, and {f} the facts.
        cause: Why that is, or why it matters.
        fix: What to type.
    """

    def rule(facts: Facts) -> Findings:
        value = condition(facts)
        if value:
            texts = [text.format(value, f=facts) for text in (found, cause, fix)]
            yield MachineFinding(severity, *texts)

    return rule


error_if, warning_if, note_if = (partial(one_finding, severity) for severity in SEVERITIES)
