"""The rules: each a function from facts to what it finds. They look at nothing but the facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal

from stepladder.tools.doctor.facts import Facts

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
FAMILIES = ("torch", "gpu", "machine", "network", "launch")  # modules rules_*


@dataclass(frozen=True)
class Finding:
    """What a rule says: what was found, why that is or why it matters, what to type. rule: its name."""

    severity: Severity
    found: str
    cause: str
    fix: str
    rule: str = ""


Rule = Callable[[Facts], Iterator[Finding]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Enter a rule under its name, with hyphens."""
    RULES[function.__name__.replace("_", "-")] = function
    return function


def judge(facts: Facts) -> list[Finding]:
    """All findings, errors first."""
    for family in FAMILIES:
        import_module(f"stepladder.tools.doctor.rules_{family}")
    found = [replace(finding, rule=name) for name, judged in RULES.items() for finding in judged(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def nproc_wanted(facts: Facts) -> int:
    """Processes on this machine: as asked for, else one per GPU that is not hidden, else one."""
    return facts.nproc or facts.torch.devices or len(facts.gpus.found) or 1


def tasks_here(facts: Facts) -> int:
    """Tasks on this node of the Slurm step that this process is in; 0 outside a step of several."""
    if not re.fullmatch(r"[2-9]|\d\d+", facts.env.get("SLURM_STEP_NUM_TASKS", "")):
        return 0
    first = re.match(r"\d+", facts.env.get("SLURM_STEP_TASKS_PER_NODE", ""))  # as in 2(x3),1
    return int(first.group()) if first else 0
