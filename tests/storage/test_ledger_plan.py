"""What the audit expects of each rank is what the plan gives it."""

from __future__ import annotations

import numpy as np
import pytest

from stepladder.core.plan import Plan
from stepladder.storage.ledger import compute_digests
from stepladder.storage.ledger_plan import compute_planned_steps


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_the_deal_in_rounds_gives_each_microbatch_once_and_the_audit_knows_who_has_it(
    ranks: int,
) -> None:
    plan = Plan(46, 16, 2, seed=3)
    for step in (0, 2):  # the last one has fewer
        shares = [plan.share(step, rank, ranks, round_robin=True) for rank in range(ranks)]
        assert [span.number % ranks for spans in shares for span in spans] == [
            rank for rank, spans in enumerate(shares) for _ in spans
        ]
        complete = sorted(
            (span for spans in shares for span in spans), key=lambda span: span.number
        )
        assert complete == plan.microbatches(step)
        planned = compute_planned_steps(plan, 0, 3, ranks, round_robin=True)
        for rank, spans in enumerate(shares):
            own_part = np.concatenate(
                [np.empty(0, np.int64), *(plan.indices(step, span) for span in spans)]
            )
            assert planned.counts[step, rank] == len(own_part)
            assert planned.digests[step, rank] == compute_digests(own_part, [len(own_part)])[0]
