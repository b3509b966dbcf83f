"""All rules about machines by name, and their findings."""

from __future__ import annotations

from collections.abc import Iterator

from stepladder.tools.doctor.finding import MACHINE_TEXTS, Findings, Rule, problem
from stepladder.tools.doctor.machine_facts import Facts
from stepladder.tools.doctor.rules_machine import MACHINE_RULES
from stepladder.tools.doctor.rules_network import NETWORK_RULES
from stepladder.tools.doctor.rules_torch import TORCH_RULES
from stepladder.tools.findings.finding import Finding, sort_by_severity

RULES: dict[str, Rule] = TORCH_RULES | MACHINE_RULES | NETWORK_RULES
MACHINE_TEXTS.validate(RULES)


def _findings_of(name: str, facts: Facts) -> Findings:
    result = RULES[name](facts)
    if isinstance(result, Iterator):
        yield from result
    elif result:
        yield problem(name, facts, value=result)


def apply_rules(facts: Facts) -> list[Finding]:
    """Return all findings, errors first."""
    return sort_by_severity(finding for name in RULES for finding in _findings_of(name, facts))
