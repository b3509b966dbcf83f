"""The rule for evaluations of one rank's share that decide which weights are kept."""

from __future__ import annotations

from pathlib import PurePath

from stepladder.tools.check.events import Print, Save
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, rank_rule
from stepladder.tools.check.rules.metrics import (
    describe_share,
    evaluations_of_shares,
    has_collective_after,
)


@rank_rule("one-rank-metric.best")
def best_of_one_rank(evidence: RunEvidence) -> Findings:
    """Find weights that are saved after an evaluation of one rank's share that nothing shows.

    What is shown has its own finding. What is not shown decides whether they are saved.
    """
    for passes in evaluations_of_shares(evidence):
        if any(map(has_collective_after, evidence.ranks, passes)):
            continue
        following = list(evidence.rank_0.events_until_training(passes[0]))
        saves = [event for event in following if isinstance(event, Save) and event.model]
        is_shown = any(isinstance(event, Print) for event in following)
        if saves and not is_shown:
            yield evidence.finding(
                "one-rank-metric.best",
                saves[0].at,
                f"{describe_share(passes)}, no collective follows, and it writes "
                f"{PurePath(saves[0].path).name}",
                0,
            )
            return
