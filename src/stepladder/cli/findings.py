"""Findings in the terminal, in the colours of their severities."""

from __future__ import annotations

import click

from stepladder.core.console import echo
from stepladder.tools.findings.finding import Finding
from stepladder.tools.findings.render import format_finding

SEVERITY_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def show_finding(finding: Finding) -> None:
    """Print a finding."""
    click.secho(finding.severity, fg=SEVERITY_COLOURS[finding.severity], nl=False)
    echo(format_finding(finding))
