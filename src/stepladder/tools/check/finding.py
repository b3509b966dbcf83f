"""What a rule says, and the texts of all rules, which live in rules.toml: one source for findings
and pages.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class RuleText:
    """what: the mistake in a sentence.  why: what it does to a training.  fix: text to type."""

    id: str
    family: str
    severity: Severity
    what: str
    why: str
    fix: str
    example: str = ""


@dataclass(frozen=True)
class CodeLine:
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Fault:
    """A finding: the rule, where, on which rank (-1: on all), and the evidence in numbers."""

    rule: str
    place: CodeLine
    evidence: str
    rank: int = -1
    level: str = ""  # another severity than the rule's own
    fix: str = ""  # what to type where the rule's own text does not fit

    @property
    def text(self) -> RuleText:
        text = texts()[self.rule]
        return replace(text, fix=self.fix) if self.fix else text

    @property
    def severity(self) -> str:
        return self.level or self.text.severity

    @property
    def key(self) -> tuple[str, str, int]:
        return self.rule, self.place.file, self.place.line

    def as_json(self) -> dict[str, Any]:
        text = self.text
        about = {"rule": self.rule, "severity": self.severity, **asdict(self.place)}
        about |= {"rank": self.rank if self.rank >= 0 else None, "evidence": self.evidence}
        return about | {"what": text.what, "why": text.why, "fix": text.fix}


@cache
def texts() -> dict[str, RuleText]:
    table = tomllib.loads((Path(__file__).parent / "rules.toml").read_text(encoding="utf-8"))
    return {name: RuleText(name, **fields) for name, fields in table.items()}


def worst_first(faults: list[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda f: (SEVERITIES.index(f.severity), f.place.file, f.place.line))
