"""Rules for models that are wrapped twice, changed after that, or cut into unlike shards."""

from __future__ import annotations

from stepladder.tools.check.events import (
    Backward,
    ModelMoved,
    OptimizerStep,
    Sharding,
    StateDictLoad,
    WrapperBuilt,
)
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule, run_rule
from stepladder.tools.check.rules.model import first_difference


@run_rule("moved-after-wrapping", "moved-after-wrapping.twice")
def moved_after_wrapping(evidence: RunEvidence) -> Findings:
    """Find a trained model that changed its device or type after it was wrapped."""
    log = evidence.rank_0
    last_backward = max((event.n for event in log.select(Backward)), default=0)
    for event in log.select(ModelMoved):
        if event.n < last_backward:
            yield evidence.finding(
                "moved-after-wrapping",
                event.at,
                f"the wrapped model goes from {event.before} to {event.after}, and is then trained",
            )
            break
    for wrapper in log.select(WrapperBuilt):
        if wrapper.nested:
            yield evidence.finding(
                "moved-after-wrapping.twice",
                wrapper.at,
                f"the model that is wrapped is or holds a {wrapper.nested} already",
            )
            break


@rank_rule("replicas-differ.shards")
def shards_differ(evidence: RunEvidence) -> Findings:
    """Find shards that are cut from another model on each rank, and are trained.

    This is a note, for a mixture of independent draws is a draw as well.
    """
    loads = evidence.rank_0.select(StateDictLoad)
    if not evidence.rank_0.select(OptimizerStep):
        return
    for first, second in align(log.select(Sharding) for log in evidence.first_ranks):
        name = first_difference(first.weights, second.weights)
        if name and not any(load.n > first.n for load in loads):
            yield evidence.finding(
                "replicas-differ.shards",
                first.at,
                f"{name} differs between rank 0 and rank 1 when the model is cut into shards",
            )
            return
