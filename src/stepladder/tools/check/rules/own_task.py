"""The rule for ranks that hold other samples under the same indices."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import correlation, pstdev

from stepladder.tools.check.events import Draw
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, rank_rule

MIN_HELD = 10
MAX_CORRELATION = 0.5  # of samples that have no more in common than their index


@rank_rule("own-task")
def own_samples(evidence: RunEvidence) -> Findings:
    """Find a data set that a sampler divides, and of which two ranks hold other samples.

    Numbers that the script draws may stand in for data, so for them this is a note.
    """
    for first, second, *_ in evidence.training_passes()[:1]:
        is_divided = first.is_divided and second.is_divided
        if is_divided and are_unrelated(first.start.held, second.start.held):
            draws = [e for e in evidence.rank_0.select(Draw) if e.n < first.start.n]
            is_drawn = any(event.fn != "randperm" for event in draws)
            yield evidence.finding(
                "own-task",
                draws[-1].at if draws else first.loader_line,
                f"rank 0 and rank 1 hold {first.start.base_length} samples each, and other ones "
                f"by the same index",
                severity="note" if is_drawn else None,
            )


def are_unrelated(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether sums of samples have no more in common than their index."""
    if len(first) != len(second) or len(first) < MIN_HELD or not (pstdev(first) and pstdev(second)):
        return False
    return correlation(first, second) < MAX_CORRELATION
