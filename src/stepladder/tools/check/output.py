"""Findings for a person, for programs and for code hosts (SARIF 2.1.0)."""

from __future__ import annotations

import json
from typing import Any

from stepladder.tools.check.check import Report
from stepladder.tools.check.finding import Fault, texts

LEVELS = {"error": "error", "warning": "warning", "note": "note"}


def lines_of(fault: Fault) -> tuple[str, str]:
    """The line that names it, and the lines below."""
    rank = f" (rank {fault.rank})" if fault.rank >= 0 else ""
    fix = fault.text.fix.replace("\n", "\n         ")
    below = f"    seen: {fault.evidence}\n    why: {fault.text.why}\n    fix: {fix}"
    return f" {fault.rule}: {fault.place}{rank}: {fault.text.what}", below


def as_json(report: Report) -> str:
    found = [fault.as_json() for fault in report.faults]
    why = report.not_checked
    shown: dict[str, Any] = {
        "schema": 1,
        "ok": report.code == 0,
        "rules": len(texts()),
        "ran": report.ran,
    }
    if report.isolation:
        shown["isolation"] = report.isolation.as_json()
    shown |= {"notes": report.notes, "failed": failed_by_itself(report), "findings": found}
    return json.dumps(shown | {"not_checked": why.as_json() if why else None})


def failed_by_itself(report: Report) -> str:
    why = report.not_checked
    return (why.output or why.line)[-4000:] if why and why.cause == "script" else ""


def as_sarif(report: Report, version: str) -> str:
    rules = [
        {
            "id": name,
            "shortDescription": {"text": text.what},
            "fullDescription": {"text": text.why},
            "help": {"text": text.fix},
            "defaultConfiguration": {"level": LEVELS[text.severity]},
        }
        for name, text in texts().items()
    ]
    results = [
        {
            "ruleId": fault.rule,
            "level": LEVELS[fault.severity],
            "message": {"text": f"{fault.text.what} {fault.evidence}. Fix: {fault.text.fix}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": fault.place.file.replace("\\", "/")},
                        "region": {"startLine": max(1, fault.place.line)},
                    }
                }
            ],
        }
        for fault in report.faults
    ]
    ended: dict[str, Any] = {
        "executionSuccessful": report.not_checked is None,
        "exitCode": report.code,
    }
    if report.not_checked:
        ended["toolExecutionNotifications"] = [
            {"level": "error", "message": {"text": report.not_checked.line}}
        ]
    driver = {"name": "stepladder check", "version": version, "rules": rules}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    run = {"tool": {"driver": driver}, "invocations": [ended], "results": results}
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=1)
