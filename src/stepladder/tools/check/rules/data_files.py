"""Rules for the files in which a data set lies."""

from __future__ import annotations

from collections import defaultdict

from stepladder.tools.check.events import FileRead, SharedFile
from stepladder.tools.check.rules.evidence import (
    Findings,
    RunEvidence,
    are_complete,
    rank_rule,
    run_rule,
)


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


@rank_rule("samples-lost")
def files_unread(evidence: RunEvidence) -> Findings:
    """Find files of a training set in several files that no rank has opened."""
    complete = list(filter(are_complete, evidence.training_passes()))
    if not complete:
        return
    existing: dict[str, set[str]] = defaultdict(set)
    opened: dict[str, set[str]] = defaultdict(set)
    for event in read_events_of_all(evidence):
        existing[event.pattern].update(event.beside)
        opened[event.pattern].add(event.path)
    for pattern, paths in opened.items():
        unread = existing[pattern] - paths
        is_data_set = len(paths) >= 2 * len(evidence.ranks)
        if is_data_set and 0 < len(unread) < len(paths):
            yield evidence.finding(
                "samples-lost",
                complete[0][0].loader_line,
                f"{len(unread)} of {len(existing[pattern])} files {pattern} are opened by no "
                f"rank, in any of {len(complete)} passes",
            )
            return


def read_events_of_all(evidence: RunEvidence) -> list[FileRead]:
    """Return which files the ranks and their workers have opened."""
    events = [e for log in evidence.ranks for e in [*log.select(FileRead), *log.worker_events]]
    return [event for event in events if isinstance(event, FileRead)]
