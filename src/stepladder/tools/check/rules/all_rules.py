"""All rules of this folder, which register themselves, and what becomes of their findings."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module

from stepladder.tools.check import rules
from stepladder.tools.check.rules.evidence import CHECK_TEXTS, RunEvidence, run_rule, source_rule
from stepladder.tools.check.script_source import ScriptSource
from stepladder.tools.findings.finding import Finding

MODULES = [
    import_module(f"{rules.__name__}.{module.name}")
    for module in pkgutil.iter_modules(rules.__path__)
    if not __name__.endswith(f".{module.name}")
]
DAMAGE_OF_A_SNAPSHOT = ("resume-samples", "resume-lr", "resume-differs")


def apply_rules(evidence: RunEvidence, early: bool = False) -> list[Finding]:
    """Return the findings of all rules, or only of those that are certain early."""
    if not evidence.ranks:
        return []
    findings: list[Finding] = []
    for rule in run_rule.rules:
        if rule.is_early or not early:
            findings += rule.function(evidence)
    return drop_consequences(drop_suppressed(unique_findings(findings), evidence.source))


def apply_source_rules(source: ScriptSource) -> list[Finding]:
    """Return the findings of the rules that read the source alone."""
    findings = [finding for rule in source_rule.rules for finding in rule.function(source)]
    return drop_suppressed(findings, source)


def unique_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first finding of each rule and line."""
    by_key: dict[tuple[str, str, int], Finding] = {}
    for finding in findings:
        by_key.setdefault(finding.key, finding)
    return list(by_key.values())


def drop_suppressed(findings: list[Finding], source: ScriptSource) -> list[Finding]:
    """Return the findings that no comment in the source suppresses."""
    return [finding for finding in findings if not source.is_suppressed(*finding.key)]


def drop_consequences(findings: list[Finding]) -> list[Finding]:
    """Return the findings without those that another finding explains."""
    names = set(names_of(findings))
    return [
        finding
        for finding in findings
        if names.isdisjoint(CHECK_TEXTS.texts[finding.rule].explained_by)
    ]


def names_of(findings: Iterable[Finding]) -> list[str]:
    """Return the names by which texts refer to findings: rules alone, and with severities."""
    return [name for f in findings for name in (f.rule, f"{f.rule} {f.severity}")]


def drop_known(findings: list[Finding], known: list[Finding]) -> list[Finding]:
    """Return the findings whose rule was not found before, nor anything else at their line."""
    rules = {finding.rule for finding in known}
    lines = {finding.key[1:] for finding in known}
    return [each for each in findings if each.rule not in rules and each.key[1:] not in lines]


def add_measured_damage(findings: list[Finding], measured: list[Finding]) -> list[Finding]:
    """Return findings in which an incomplete snapshot is an error if a resume has shown its damage.

    Args:
        findings: What was found in the unbroken run.
        measured: What the comparison with a resumed run has found.
    """
    damage = [finding for finding in measured if finding.rule in DAMAGE_OF_A_SNAPSHOT]
    if not damage:
        return findings
    return [
        replace(
            finding, severity="error", evidence=f"{finding.evidence}; then {damage[0].evidence}"
        )
        if finding.rule == "incomplete-snapshot"
        else finding
        for finding in findings
    ]
