"""The evidence that a rule examines, and the types of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stepladder.tools.check.finding import CodeLine, Finding
from stepladder.tools.check.recording import LoaderPass, Recording
from stepladder.tools.check.script_source import ScriptSource


@dataclass(frozen=True)
class RunEvidence:
    """The recording of one run of a script, and the source of the script.

    A recorded line is a list of file, line number and function, or None.
    """

    run: Recording
    source: ScriptSource

    def code_line(self, recorded: Any) -> CodeLine:
        """Return a recorded line, with the file name that the user knows."""
        if not recorded:
            first = self.source.files[0]
            return CodeLine(first.name, 1)
        name = str(recorded[0])
        number = int(recorded[1])
        for root in (self.run.copy, self.run.original):
            folder = f"{root}/"
            if root and name.startswith(folder):
                name = name.removeprefix(folder)
                break
        return CodeLine(name, number)

    def finding(
        self,
        rule: str,
        recorded: Any,
        evidence: str,
        rank: int = -1,
        severity: str = "",
    ) -> Finding:
        """Return a finding of a rule at a recorded line."""
        line = self.code_line(recorded)
        return Finding(rule, line, evidence, rank, severity)

    def training_passes(self) -> list[list[LoaderPass]]:
        """Return the training passes in order, each as a list with one pass per rank.

        Only as many passes are returned as all ranks have.
        """
        return zip_passes([log.training_passes for log in self.run.ranks])

    def evaluation_passes(self) -> list[list[LoaderPass]]:
        """Return the evaluation passes in order, each as a list with one pass per rank."""
        return zip_passes([log.evaluation_passes for log in self.run.ranks])

    @property
    def has_several_ranks(self) -> bool:
        return len(self.run.ranks) > 1


def zip_passes(passes_of_ranks: list[list[LoaderPass]]) -> list[list[LoaderPass]]:
    """Return passes in order, each as a list with one pass per rank."""
    return [list(passes) for passes in zip(*passes_of_ranks, strict=False)]


Findings = Iterator[Finding]
Rule = Callable[[RunEvidence], Findings]
