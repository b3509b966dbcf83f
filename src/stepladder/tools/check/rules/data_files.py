"""Rules for the files in which a data set lies."""

from __future__ import annotations

from stepladder.tools.check.events import SharedFile
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule


@run_rule("file-over-fork")
def file_over_fork(evidence: RunEvidence) -> Findings:
    """Find a file of the data set that is open when the loader forks its workers."""
    for rank, event in evidence.run.select(SharedFile):
        yield evidence.finding(
            "file-over-fork",
            event.at,
            f"{event.path} is an open {event.type} when the loader's workers are forked",
            rank,
        )
        return
