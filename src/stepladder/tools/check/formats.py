"""Formats of findings: for a person, for programs, and for code hosts (SARIF 2.1.0)."""

from __future__ import annotations

import json
from typing import Any

from stepladder.tools.check.check import Report
from stepladder.tools.check.finding import Finding, RuleText, rule_texts

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MOST_OUTPUT_CHARACTERS = 4000


def format_finding(finding: Finding) -> tuple[str, str]:
    """Return the line that names a finding, without its severity, and the lines below."""
    rank = f" (rank {finding.rank})" if finding.rank >= 0 else ""
    text = finding.text
    head = f" {finding.rule}: {finding.code_line}{rank}: {text.what}"
    fix = text.fix.replace("\n", "\n         ")
    return head, f"    seen: {finding.evidence}\n    why: {text.why}\n    fix: {fix}"


def format_json(report: Report) -> str:
    not_checked = report.not_checked
    fields: dict[str, Any] = {
        "schema": 1,
        "ok": report.exit_code == 0,
        "rules": len(rule_texts()),
        "ran": report.run_summary,
    }
    if report.isolation:
        fields["isolation"] = report.isolation.as_json()
    fields["notes"] = report.notes
    fields["failed"] = output_of_failed_script(report)
    fields["findings"] = [finding.as_json() for finding in report.findings]
    fields["not_checked"] = not_checked.as_json() if not_checked else None
    return json.dumps(fields)


def output_of_failed_script(report: Report) -> str:
    reason = report.not_checked
    if reason is None or reason.cause != "script":
        return ""
    return (reason.output or reason.line)[-MOST_OUTPUT_CHARACTERS:]


def format_sarif(report: Report, version: str) -> str:
    rules = [sarif_rule(name, text) for name, text in rule_texts().items()]
    invocation: dict[str, Any] = {
        "executionSuccessful": report.not_checked is None,
        "exitCode": report.exit_code,
    }
    if report.not_checked:
        invocation["toolExecutionNotifications"] = [
            {"level": "error", "message": {"text": report.not_checked.line}}
        ]
    driver = {"name": "stepladder check", "version": version, "rules": rules}
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": [sarif_result(finding) for finding in report.findings],
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def sarif_rule(name: str, text: RuleText) -> dict[str, Any]:
    return {
        "id": name,
        "shortDescription": {"text": text.what},
        "fullDescription": {"text": text.why},
        "help": {"text": text.fix},
        "defaultConfiguration": {"level": text.severity},  # SARIF has the same three levels
    }


def sarif_result(finding: Finding) -> dict[str, Any]:
    location = {
        "artifactLocation": {"uri": finding.code_line.file.replace("\\", "/")},
        "region": {"startLine": max(1, finding.code_line.line)},
    }
    text = finding.text
    return {
        "ruleId": finding.rule,
        "level": finding.severity,
        "message": {"text": f"{text.what} {finding.evidence}. Fix: {text.fix}"},
        "locations": [{"physicalLocation": location}],
    }
