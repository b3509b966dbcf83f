"""The rule for evaluations of one rank's share that decide which weights are kept."""

from __future__ import annotations

from pathlib import PurePath

from stepladder.tools.check.events import Print, Save, ScriptCollective
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import (
    Findings,
    Passes,
    RunEvidence,
    are_complete,
    rank_rule,
)
from stepladder.tools.check.rules.samples import shares_of

WITHOUT_RESULT = ("barrier", "reduce", "gather", "gather_object")  # on ranks other than the first


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


def evaluations_of_shares(evidence: RunEvidence) -> list[Passes]:
    """Return the evaluations in which each rank has read other samples."""
    return [p for p in evidence.evaluation_passes() if are_complete(p) and are_shares(p)]


def describe_share(passes: Passes) -> str:
    counts = [one_pass.sample_count for one_pass in passes]
    return f"rank 0 evaluates {counts[0]} of {sum(counts)} samples"


def are_shares(passes: Passes) -> bool:
    """Return whether the ranks have read different samples."""
    shares = shares_of(passes)
    if not shares or not shares[0]:
        return False
    first = set(shares[0])
    return len(first.intersection(shares[1])) < 0.5 * len(first)


def has_collective_after(log: RankLog, one_pass: LoaderPass) -> bool:
    """Return whether all ranks get a result in the pass, or after it."""
    events = [*one_pass.events, *log.events_until_training(one_pass)]
    collectives = [event for event in events if isinstance(event, ScriptCollective)]
    without_result = WITHOUT_RESULT if log.rank else ("barrier",)
    return any(event.op not in without_result for event in collectives)
