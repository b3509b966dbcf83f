"""All rules of this folder, which register themselves, and what becomes of their findings."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
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


def apply_rules(
    evidence: RunEvidence,
    early: bool = False,
) -> list[Finding]:
    """Return the findings of all rules, or only of those that are certain early."""
    if not evidence.ranks:
        return []
    findings: list[Finding] = []
    for rule in run_rule.rules:
        if rule.is_early or not early:
            findings += rule.function(evidence)
    return drop_consequences(drop_suppressed(unique_findings(findings), evidence.source))


def apply_source_rules(
    source: ScriptSource,
    static: bool = True,
) -> list[Finding]:
    """Return the findings of the rules that read the source alone.

    Args:
        source: The script.
        static: Whether the script is not run, so that no other rule finds more.
    """
    findings: list[Finding] = []
    for rule in source_rule.rules:
        if static or not rule.static_only:
            findings += rule.function(source)
    return drop_suppressed(findings, source)


def unique_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first finding of each rule and line."""
    by_key: dict[tuple[str, str, int], Finding] = {}
    for finding in findings:
        by_key.setdefault(finding.key, finding)
    return list(by_key.values())


def drop_suppressed(
    findings: list[Finding],
    source: ScriptSource,
) -> list[Finding]:
    """Return the findings that no comment in the source suppresses."""
    return [finding for finding in findings if not source.is_suppressed(*finding.key)]


def drop_consequences(findings: list[Finding]) -> list[Finding]:
    """Return the findings without those that another finding explains."""
    names = {finding.rule for finding in findings}
    return [
        finding
        for finding in findings
        if names.isdisjoint(CHECK_TEXTS.texts[finding.rule].explained_by)
    ]
