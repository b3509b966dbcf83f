"""The renderer of findings: for a terminal, for programs (JSON), for code hosts (SARIF), a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from stepladder.core.numbers import format_count
from stepladder.tools.findings.finding import SEVERITIES, Finding, RuleText

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def format_finding(finding: Finding) -> str:
    """Return the lines of a finding for a terminal, without its severity."""
    location = f"{finding.location}: " if finding.location.file else ""
    lines = [f" {finding.rule}: {location}{finding.what or finding.evidence}"]
    if finding.what:
        evidence = finding.evidence.replace("\n", "\n          ")
        lines.append(f"    seen: {evidence}")
    fix = finding.fix.replace("\n", "\n         ")
    return "\n".join([*lines, f"    why: {finding.cause}", f"    fix: {fix}"])


def count_severities(findings: Iterable[Finding]) -> str:
    """Return the number of findings of each severity, such as `1 error, 0 warnings, 2 notes`."""
    severities = [finding.severity for finding in findings]
    counts = [format_count(severities.count(severity), severity) for severity in SEVERITIES]
    return ", ".join(counts)


def as_record(finding: Finding, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return a finding for JSON.

    Args:
        finding: The finding.
        keys: The attribute of each key, such as `location.line`.
    """
    return {key: attrgetter(attribute)(finding) for key, attribute in keys.items()}


def format_sarif(
    findings: Iterable[Finding],
    rules: Iterable[RuleText],
    driver: dict[str, Any],
    invocation: dict[str, Any],
) -> str:
    """Return findings as SARIF 2.1.0.

    Args:
        findings: The findings.
        rules: The texts of all rules of the tool.
        driver: The name and the version of the tool.
        invocation: How its run ended.
    """
    run = {
        "tool": {"driver": driver | {"rules": [sarif_rule(rule) for rule in rules]}},
        "invocations": [invocation],
        "results": [sarif_result(finding) for finding in findings],
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def sarif_rule(rule: RuleText) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.what},
        "fullDescription": {"text": rule.cause},
        "help": {"text": rule.fix},
        "defaultConfiguration": {"level": rule.severity},  # SARIF has the same three levels
    }


def sarif_result(finding: Finding) -> dict[str, Any]:
    location = {
        "artifactLocation": {"uri": finding.location.file.replace("\\", "/")},
        "region": {"startLine": max(1, finding.location.line)},
    }
    return {
        "ruleId": finding.rule,
        "level": finding.severity,
        "message": {"text": f"{finding.what} {finding.evidence}. Fix: {finding.fix}"},
        "locations": [{"physicalLocation": location}],
    }


def format_page(rules: Iterable[RuleText]) -> Iterator[str]:
    """Yield the parts of a Markdown page of rules, by family."""
    family = ""
    for rule in rules:
        if rule.family != family:
            family = rule.family
            yield f"## {family.capitalize()}\n"
        yield f"### {rule.id}\n\n{rule.what} ({rule.severity})\n\n{rule.cause}\n"
        yield f"<!-- not run here: it is the mistake -->\n```python\n{rule.example}\n```\n"
        yield f"Fix: `{rule.fix}`\n"
