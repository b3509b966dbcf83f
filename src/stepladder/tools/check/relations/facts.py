"""What is known of a violated relation, in the words of explanations.toml."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stepladder.tools.check.events import OptimizerBuilt
from stepladder.tools.check.relations.frozen_runs import SAME_RATIO, FrozenRuns, Violation
from stepladder.tools.check.rules.evidence import RunEvidence

# Optimizers whose steps do not depend on the size of gradients.
STEPS_BY_DIRECTION = ("Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop")


def facts_of(violation: Violation, runs: FrozenRuns, evidence: RunEvidence) -> Iterator[str]:
    """Yield the facts of a violation.

    Args:
        violation: What does not hold.
        runs: The runs in which it does not.
        evidence: What the script did on all ranks.
    """
    if math.isclose(violation.ratio, runs.factor, rel_tol=SAME_RATIO):
        yield "times the ranks"
    if math.isclose(violation.ratio * runs.factor, 1, rel_tol=SAME_RATIO):
        yield "by the ranks"
    if any(event.cls in STEPS_BY_DIRECTION for event in evidence.rank_0.select(OptimizerBuilt)):
        yield "steps by direction"
