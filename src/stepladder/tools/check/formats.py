"""The JSON and SARIF of a check."""

from __future__ import annotations

import json
from typing import Any

from stepladder.tools.check.check import Report
from stepladder.tools.check.rules.evidence import CHECK_TEXTS
from stepladder.tools.findings.render import as_record, format_sarif

MAX_OUTPUT_CHARACTERS = 4000
CHECK_RECORD_KEYS = {
    "rule": "rule",
    "severity": "severity",
    "file": "location.file",
    "line": "location.line",
    "rank": "location.rank",
    "evidence": "evidence",
    "what": "what",
    "why": "cause",
    "fix": "fix",
}


def json_of_report(report: Report) -> str:
    not_checked = report.not_checked
    fields: dict[str, Any] = {
        "schema": 1,
        "ok": report.exit_code == 0,
        "rules": len(CHECK_TEXTS.rules),
        "ran": report.run_summary,
    }
    if report.isolation:
        fields["isolation"] = report.isolation.as_json()
    fields["held"] = report.held
    fields["notes"] = report.notes
    fields["failed"] = ""
    if not_checked and not_checked.cause == "script":
        fields["failed"] = (not_checked.output or not_checked.line)[-MAX_OUTPUT_CHARACTERS:]
    fields["findings"] = [as_record(finding, CHECK_RECORD_KEYS) for finding in report.findings]
    fields["not_checked"] = not_checked.as_json() if not_checked else None
    return json.dumps(fields)


def sarif_of_report(report: Report, version: str) -> str:
    invocation: dict[str, Any] = {
        "executionSuccessful": report.not_checked is None,
        "exitCode": report.exit_code,
    }
    if report.not_checked:
        invocation["toolExecutionNotifications"] = [
            {"level": "error", "message": {"text": report.not_checked.line}}
        ]
    driver = {"name": "stepladder check", "version": version}
    return format_sarif(report.findings, CHECK_TEXTS.rules, driver, invocation)
