"""All rules by name, and what they say of a machine."""

from __future__ import annotations

from dataclasses import replace

from stepladder.tools.doctor import rules_machine, rules_network, rules_torch
from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.finding import SEVERITIES, Finding, Rule

RULES: dict[str, Rule] = rules_torch.RULES | rules_machine.RULES | rules_network.RULES


def judge(facts: Facts) -> list[Finding]:
    """All findings, errors first."""
    found = [replace(finding, rule=name) for name, rule in RULES.items() for finding in rule(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
