"""What a rule says, and how a rule of one shape is written. Rules look at nothing but the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from stepladder.tools.doctor.facts import Facts

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

CLOCKS_APART = (  # cause and fix
    "heartbeats of nodes are compared by clock: beyond 3 s a living node looks lost",
    "chronyc tracking, or systemctl restart systemd-timesyncd, on all nodes",
)


@dataclass(frozen=True)
class Finding:
    """What a rule says: what was found, why that is or why it matters, what to type. rule: its
    name.
    """

    severity: Severity
    found: str
    cause: str
    fix: str
    rule: str = ""


Findings = Iterator[Finding]
Rule = Callable[[Facts], Findings]
error, warning, note = (partial(Finding, severity) for severity in SEVERITIES)


def one_finding(
    severity: Severity, seen: Callable[[Facts], Any], found: str, cause: str, fix: str
) -> Rule:
    """Says so where `seen` gives something true. The texts have {0} for that, and {f} for the
    facts.
    """

    def rule(facts: Facts) -> Findings:
        if what := seen(facts):
            yield Finding(severity, *(text.format(what, f=facts) for text in (found, cause, fix)))

    return rule


error_if, warning_if, note_if = (partial(one_finding, severity) for severity in SEVERITIES)
