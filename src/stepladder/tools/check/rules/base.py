"""What all rules are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stepladder.tools.check.finding import CodeLine, Fault
from stepladder.tools.check.recording import Pass, Recording
from stepladder.tools.check.tree import Code


@dataclass(frozen=True)
class Seen:
    """What a rule may look at. nodes: the ranks play several nodes."""

    run: Recording
    source: Code

    def place(self, at: Any, default: Any = None) -> CodeLine:
        """A recorded line, under the name that the user knows the file by."""
        at = at or default
        if not at:
            first = self.source.files[0]
            return CodeLine(first.name, 1)
        name = str(at[0])
        for root in (self.run.copy, self.run.original):
            if root and name.startswith(root + "/"):
                return CodeLine(name[len(root) + 1 :], int(at[1]))
        return CodeLine(name, int(at[1]))

    def line(self, at: Any) -> str:
        """The text of a recorded line."""
        place = self.place(at)
        file = self.source.file(place.file)
        return file.line(place.line) if file else ""

    def fault(self, rule: str, at: Any, evidence: str, rank: int = -1, level: str = "") -> Fault:
        return Fault(rule, self.place(at), evidence, rank, level)

    def training(self) -> list[list[Pass]]:
        """Training passes by number, each with that of every rank; only as many as all ranks have."""
        return [
            list(passes) for passes in zip(*(log.training for log in self.run.ranks), strict=False)
        ]

    def evaluations(self) -> list[list[Pass]]:
        return [
            list(passes)
            for passes in zip(*(log.evaluations for log in self.run.ranks), strict=False)
        ]

    @property
    def many(self) -> bool:
        return len(self.run.ranks) > 1


Faults = Iterator[Fault]
Rule = Callable[[Seen], Faults]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / max(1, len(numbers))
