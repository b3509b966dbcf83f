"""One form of finding for every tool, and the catalogue of the texts of a tool's rules.

A tool keeps its texts in rules.toml, a table for each rule. A rule that has several causes has a
table `rule.case` for each other cause; findings name the rule alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Location:
    """A line of a file, and a rank; without a file, the machine itself."""

    file: str = ""
    line: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" (rank {self.rank})"
        return f"{self.file}:{self.line}{rank}"


@dataclass(frozen=True)
class Finding:
    """A problem that a rule has found.

    Args:
        evidence: What was measured or read.
        cause: Why that is, or what it does to a training.
        fix: What to type.
        what: The mistake in one sentence; empty where the evidence says it.
    """

    rule: str
    severity: Severity
    location: Location
    evidence: str
    cause: str
    fix: str
    what: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.rule, self.location.file, self.location.line

    def moved_to(self, file: str) -> Finding:
        """Return the finding with another name of its file."""
        return replace(self, location=replace(self.location, file=file))


@dataclass(frozen=True)
class RuleText:
    """The texts of one rule, or of one case of it.

    Args:
        cause: Its cause, or its effect on a training.
        fix: The text to type.
        what: The mistake, in one sentence.
        evidence: What is found, with blanks for what was measured; empty where the rule writes it.
        example: Code with the mistake.
        early: Whether findings are certain while a script still runs.
        explained_by: The rules whose findings are the cause of this rule's, which are then dropped.
        on_request: Whether findings are shown only if notes of this kind are asked for.
    """

    id: str
    severity: Severity
    cause: str
    fix: str
    what: str = ""
    evidence: str = ""
    example: str = ""
    family: str = ""
    early: bool = False
    explained_by: tuple[str, ...] = ()
    on_request: bool = False

    def __post_init__(self) -> None:
        has_text = self.evidence or (self.what and self.example)
        if self.severity not in SEVERITIES or not (self.cause and self.fix and has_text):
            raise ValueError(f"rule {self.id} lacks a text, an example or a severity")


class Catalogue:
    """The texts of all rules of one tool.

    Args:
        package: The package with the file rules.toml.
    """

    def __init__(self, package: str) -> None:
        text = files(package).joinpath("rules.toml").read_text(encoding="utf-8")
        entries = tomllib.loads(text)
        self.texts = {name: RuleText(name, **entry) for name, entry in entries.items()}

    @property
    def rules(self) -> list[RuleText]:
        return [text for name, text in self.texts.items() if "." not in name]

    def validate(self, names: Iterable[str]) -> None:
        """Raise ValueError where a rule of the code has no text. Called at import."""
        missing = [name for name in names if name not in self.texts]
        if missing:
            raise ValueError(f"no text in rules.toml for {', '.join(missing)}")

    def finding(
        self,
        rule: str,
        location: Location = Location(),
        evidence: str = "",
        severity: Severity | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> Finding:
        """Return the finding of a rule, or of `rule.case`.

        Args:
            rule: The rule.
            location: The line of the mistake.
            evidence: What was found, where the rule's text does not say it.
            severity: A severity other than that of the text.
            values: What fills the blanks of the texts.
        """
        text = self.texts[rule]
        texts = (evidence or text.evidence, text.cause, text.fix)
        if values:
            texts = tuple(part.format_map(values) for part in texts)  # type: ignore[assignment]
        return Finding(
            rule.partition(".")[0], severity or text.severity, location, *texts, text.what
        )


def sort_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the most severe ones first, each severity by file and line."""

    def sort_key(finding: Finding) -> tuple[int, str, int]:
        location = finding.location
        return SEVERITIES.index(finding.severity), location.file, location.line

    return sorted(findings, key=sort_key)
