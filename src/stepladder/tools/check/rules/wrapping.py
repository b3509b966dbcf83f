"""Rules for models that are changed as a whole after they were wrapped, or wrapped twice."""

from __future__ import annotations

from stepladder.tools.check.events import Backward, ModelMoved, WrapperBuilt
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule


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
