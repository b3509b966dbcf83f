"""All rules about machines by name, and their findings."""

from __future__ import annotations

from dataclasses import replace

from stepladder.tools.doctor import rules_machine, rules_network, rules_torch
from stepladder.tools.doctor.finding import SEVERITIES, MachineFinding, Rule
from stepladder.tools.doctor.machine_facts import Facts

RULES: dict[str, Rule] = (
    rules_torch.TORCH_RULES | rules_machine.MACHINE_RULES | rules_network.NETWORK_RULES
)


def apply_rules(facts: Facts) -> list[MachineFinding]:
    """Return all findings, errors first."""
    findings = [
        replace(finding, rule=name) for name, rule in RULES.items() for finding in rule(facts)
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
