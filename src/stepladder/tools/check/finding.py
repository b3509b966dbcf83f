"""Findings of rules, and the texts of all rules.

The texts are in rules.toml, from which findings and the documentation page are made.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class RuleText:
    """The texts of one rule.

    Attributes:
        what: The mistake, in one sentence.
        why: Its effect on a training.
        fix: The text to type.
    """

    id: str
    family: str
    severity: Severity
    what: str
    why: str
    fix: str
    example: str = ""


@dataclass(frozen=True)
class CodeLine:
    """A line of the script, or of a module that it imports."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """A mistake that a rule has found, with the evidence in numbers.

    Attributes:
        rule: The name of the rule.
        code_line: The line of the mistake.
        evidence: What was measured or read.
        rank: The rank with the mistake; -1 for all ranks.
        severity_override: A severity other than that of the rule.
        fix: The text to type, where the text of the rule does not fit.
    """

    rule: str
    code_line: CodeLine
    evidence: str
    rank: int = -1
    severity_override: str = ""
    fix: str = ""

    @property
    def text(self) -> RuleText:
        text = rule_texts()[self.rule]
        return replace(text, fix=self.fix) if self.fix else text

    @property
    def severity(self) -> str:
        return self.severity_override or self.text.severity

    @property
    def key(self) -> tuple[str, str, int]:
        return self.rule, self.code_line.file, self.code_line.line

    def as_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "severity": self.severity,
            "file": self.code_line.file,
            "line": self.code_line.line,
            "rank": self.rank if self.rank >= 0 else None,
            "evidence": self.evidence,
            "what": self.text.what,
            "why": self.text.why,
            "fix": self.text.fix,
        }


@cache
def rule_texts() -> dict[str, RuleText]:
    path = Path(__file__).parent / "rules.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: RuleText(name, **fields) for name, fields in table.items()}


def sort_by_severity(findings: list[Finding]) -> list[Finding]:
    """Return findings with the most severe ones first, each severity by file and line."""

    def sort_key(finding: Finding) -> tuple[int, str, int]:
        line = finding.code_line
        return SEVERITIES.index(finding.severity), line.file, line.line

    return sorted(findings, key=sort_key)
