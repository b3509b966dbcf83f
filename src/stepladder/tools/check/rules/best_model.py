"""Rule for a best model that is chosen by the metric of one rank's share."""

from __future__ import annotations

from pathlib import PurePath

from stepladder.tools.check.events import Save
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.check.rules.metrics import (
    are_shares,
    events_until_training,
    has_collective_after,
    one_rank_metric,
)


@run_rule("one-rank-metric.best")
def best_of_one_rank(evidence: RunEvidence) -> Findings:
    """Find a file of the best model that is written after an evaluation of one rank's share."""
    if not evidence.has_several_ranks or next(one_rank_metric(evidence), None):
        return
    for passes in evidence.evaluation_passes():
        ranks_with_passes = list(zip(evidence.run.ranks, passes, strict=True))
        are_complete = all(one_pass.is_complete for one_pass in passes)
        if not are_complete or not are_shares(passes):
            continue
        if any(has_collective_after(log, one_pass) for log, one_pass in ranks_with_passes):
            continue
        following = events_until_training(*ranks_with_passes[0])
        saves = [event for event in following if isinstance(event, Save)]
        best = [save for save in saves if "best" in PurePath(save.path).name.lower()]
        if best:
            counts = [sum(batch.size for batch in one_pass.batches) for one_pass in passes]
            yield evidence.finding(
                "one-rank-metric.best",
                best[0].at,
                f"rank 0 evaluates {counts[0]} of {sum(counts)} samples, no collective follows, "
                f"and it writes {PurePath(best[0].path).name}",
                0,
            )
            return
