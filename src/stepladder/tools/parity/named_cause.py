"""A kind of cause with its evidence, and texts that describe runs."""

from __future__ import annotations

from dataclasses import dataclass

from stepladder.core.numbers import format_count
from stepladder.tools.parity.steps import RunSteps
from stepladder.tools.probe.events import CodeLine


@dataclass(frozen=True)
class NamedCause:
    """A kind of cause, which has its texts in rules.toml.

    Args:
        evidence: What was measured.
        line: The line of the script that it comes from.
    """

    rule: str
    evidence: str
    line: CodeLine | None = None


def loader_line(run: RunSteps) -> CodeLine | None:
    """Return the line that made the loader; of a script without one, the first call of a model."""
    passes = run.recording.ranks[0].training_passes
    if passes:
        return passes[0].loader_line
    calls = run.steps[0].first.inputs
    return calls[0].at if calls else None


def processes(run: RunSteps) -> str:
    return format_count(run.world_size, "process")
