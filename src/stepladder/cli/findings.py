"""Findings in the terminal, in the colours of their severities."""

from __future__ import annotations

import click

from stepladder.core.console import echo, print_message
from stepladder.tools.findings.finding import Finding
from stepladder.tools.findings.render import format_finding

SEVERITY_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def tell_finding(finding: Finding) -> None:
    """Print on standard error that there will be a finding, before the report has its evidence."""
    place = f"{finding.location.file}:{finding.location.line}"
    print_message(f"found already: {finding.severity} {finding.rule}, {place}")


def show_finding(finding: Finding) -> None:
    """Print a finding."""
    click.secho(finding.severity, fg=SEVERITY_COLOURS[finding.severity], nl=False)
    echo(format_finding(finding))
