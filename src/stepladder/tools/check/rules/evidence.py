"""The evidence that a rule examines, and the registers of rules.

A rule is a function with `@run_rule(...)` or `@source_rule(...)` and the names under which it has
findings. Their texts are in rules.toml: a name without text, or without example, fails at import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from stepladder.tools.check.recording import LoaderPass, RankLog, Recording
from stepladder.tools.check.script_source import ScriptSource
from stepladder.tools.findings.finding import Catalogue, Finding, Location, Severity
from stepladder.tools.probe.events import CodeLine

CHECK_TEXTS = Catalogue("stepladder.tools.check")
T = TypeVar("T")


@dataclass(frozen=True)
class RunEvidence:
    """The recording of one run of a script, and the source of the script.

    The line of an event may be None: then a finding is at the script's first line.
    """

    run: Recording
    source: ScriptSource

    @property
    def ranks(self) -> list[RankLog]:
        return self.run.ranks

    @property
    def rank_0(self) -> RankLog:
        return self.ranks[0]

    @property
    def first_ranks(self) -> list[RankLog]:
        """The two ranks that are compared where one comparison is enough."""
        return self.ranks[:2]

    def location(self, recorded: CodeLine | None) -> Location:
        """Return a recorded line, with the file name that the user knows."""
        if not recorded:
            return Location(self.source.files[0].name, 1)
        name = recorded.file
        for root in (self.run.copy, self.run.original):
            folder = f"{root}/"
            if root and name.startswith(folder):
                name = name.removeprefix(folder)
                break
        return Location(name, recorded.line)

    def finding(
        self,
        rule: str,
        recorded: CodeLine | None,
        evidence: str,
        rank: int = -1,
        severity: Severity | None = None,
    ) -> Finding:
        """Return a finding of a rule at a recorded line, on one rank or (-1) on all."""
        line = self.location(recorded)
        location = Location(line.file, line.line, rank if rank >= 0 else None)
        return CHECK_TEXTS.finding(rule, location, evidence, severity)

    def training_passes(self) -> list[Passes]:
        """Return the training passes in order, each as a tuple with one pass per rank."""
        return align(log.training_passes for log in self.run.ranks)

    def evaluation_passes(self) -> list[Passes]:
        """Return the evaluation passes in order, each as a tuple with one pass per rank."""
        return align(log.evaluation_passes for log in self.run.ranks)

    @property
    def has_several_ranks(self) -> bool:
        return len(self.run.ranks) > 1


@dataclass(frozen=True)
class Comparison:
    """What a comparison of runs has shown.

    Args:
        findings: What differs, the most certain first.
        note: What could not be compared.
        not_checked: Why nothing could be compared.
        held: Lines of what was seen.
    """

    findings: list[Finding] = field(default_factory=list)
    note: str = ""
    not_checked: str = ""
    held: list[str] = field(default_factory=list)


def align(items_of_ranks: Iterable[Sequence[T]]) -> list[tuple[T, ...]]:
    """Return the first items of all ranks, their second ones, as far as all ranks have some."""
    return list(zip(*items_of_ranks, strict=False))


def are_complete(passes: Passes) -> bool:
    return all(one_pass.is_complete for one_pass in passes)


Passes = tuple[LoaderPass, ...]  # of all ranks
Findings = Iterator[Finding]
RunRule = Callable[[RunEvidence], Findings]
SourceRule = Callable[[ScriptSource], Findings]
R = TypeVar("R", RunRule, SourceRule)


@dataclass(frozen=True)
class Registered:
    """A rule, and the names under which it has findings."""

    function: Callable[[Any], Findings]
    names: tuple[str, ...]

    @property
    def is_early(self) -> bool:
        """Whether its findings are certain while the script still runs."""
        return CHECK_TEXTS.texts[self.names[0]].early


class Register:
    """The rules of one kind, in the order of rules.toml."""

    def __init__(self) -> None:
        self.rules: list[Registered] = []

    def __call__(self, *names: str) -> Callable[[R], R]:
        """Return a decorator that registers a rule under names which must have texts."""
        CHECK_TEXTS.validate(names)
        order = list(CHECK_TEXTS.texts)

        def register(function: R) -> R:
            self.rules.append(Registered(function, names))
            self.rules.sort(key=lambda rule: (not rule.is_early, order.index(rule.names[0])))
            return function

        return register


run_rule = Register()
source_rule = Register()


def rank_rule(*names: str) -> Callable[[RunRule], RunRule]:
    """Return a decorator for a rule that compares ranks, and finds nothing of one alone."""

    def register(function: RunRule) -> RunRule:
        @run_rule(*names)
        @wraps(function)
        def compare_ranks(evidence: RunEvidence) -> Findings:
            if evidence.has_several_ranks:
                yield from function(evidence)

        return compare_ranks

    return register
