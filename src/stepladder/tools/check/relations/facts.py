"""What is known of a violated relation, in the words of explanations.toml."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stepladder.tools.check.events import BeforeStep, LocalGradients, OptimizerBuilt
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.relations.frozen_runs import SAME_RATIO, Violation
from stepladder.tools.check.rules.evidence import RunEvidence, align
from stepladder.tools.check.rules.model import are_equal

# Optimizers whose steps do not depend on the size of gradients.
STEPS_BY_DIRECTION = ("Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop")


def facts_of(violation: Violation, evidence: RunEvidence) -> Iterator[str]:
    """Yield the facts of a violation."""
    ranks = evidence.run.world_size
    if math.isclose(violation.ratio, ranks, rel_tol=SAME_RATIO):
        yield "times the ranks"
    if math.isclose(violation.ratio * ranks, 1, rel_tol=SAME_RATIO):
        yield "by the ranks"
    first_steps = align(log.select(BeforeStep)[:1] for log in evidence.ranks)
    are_alike = all(are_equal(steps[0].sums, step.sums) for steps in first_steps for step in steps)
    if are_alike and [uses_its_own_gradients(log) for log in evidence.ranks].count(True) == 1:
        yield "of one rank"
    if any(event.cls in STEPS_BY_DIRECTION for event in evidence.rank_0.select(OptimizerBuilt)):
        yield "steps by direction"


def uses_its_own_gradients(log: RankLog) -> bool:
    """Return whether each step of a rank uses what its own last backward pass has left."""
    local: LocalGradients | None = None
    are_own: list[bool] = []
    for event in log.select(LocalGradients, BeforeStep):
        if isinstance(event, LocalGradients):
            local = event
        elif local and isinstance(event, BeforeStep):
            are_own.append(are_equal(local.sums, event.sums))
            local = None
    return bool(are_own) and all(are_own)
