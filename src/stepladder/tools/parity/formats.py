"""The report of parity as text and as JSON."""

from __future__ import annotations

from typing import Any

from stepladder.tools.findings.render import as_record
from stepladder.tools.parity.compare import FirstDifference
from stepladder.tools.parity.parity import ParityReport

FINDING_KEYS = {
    "cause": "rule",
    "severity": "severity",
    "file": "location.file",
    "line": "location.line",
    "evidence": "evidence",
    "what": "what",
    "why": "cause",
    "fix": "fix",
}


def verdict(report: ParityReport) -> str:
    """Return the result in one sentence; empty where nothing was judged."""
    sizes = " and ".join(report.sizes)
    difference = report.difference
    if report.not_judged:
        return ""
    if difference is None:
        legal = [finding.rule for finding in report.findings]
        apart = f", apart from {' and '.join(legal)}" if legal else ""
        return f"the same on {sizes}{apart}: {report.steps} steps compared"
    return f"not the same on {sizes}: {describe(difference)}"


def describe(difference: FirstDifference) -> str:
    """Return where two runs differ first."""
    tensor = difference.tensor
    if difference.quantity == "initial weight":
        return f"{tensor} differs before the first step"
    if difference.quantity == "loss":
        return f"the loss and the gradient of {tensor} differ in step {difference.step}"
    if difference.quantity == "steps":
        return f"one of them has no step {difference.step}"
    text = f"the {difference.quantity} of {tensor}" if tensor else f"the {difference.quantity}"
    verb = "differ" if difference.quantity == "samples" else "differs"
    return f"{text} {verb} in step {difference.step}"


def summary_lines(report: ParityReport) -> list[str]:
    """Return the notes, what happened outside of the copy, and the verdict."""
    isolation = report.isolation.lines() if report.isolation else []
    return [*report.notes, *isolation, *filter(None, [verdict(report)])]


def as_json_object(report: ParityReport) -> dict[str, Any]:
    difference = report.difference
    not_judged = report.not_judged
    return {
        "schema": 1,
        "same": report.exit_code == 0,
        "steps": report.steps,
        "step": difference.step if difference else None,
        "quantity": difference.quantity if difference else None,
        "tensor": (difference.tensor or None) if difference else None,
        "findings": [as_record(finding, FINDING_KEYS) for finding in report.findings],
        "not_judged": not_judged.as_json() if not_judged else None,
        "isolation": report.isolation.as_json() if report.isolation else None,
        "notes": report.notes,
    }
