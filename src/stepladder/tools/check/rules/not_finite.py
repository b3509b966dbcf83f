"""The rule for losses and gradients that are nan or infinite."""

from __future__ import annotations

from stepladder.tools.check.events import Backward, NotFinite
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule


@run_rule("not-finite")
def not_finite(evidence: RunEvidence) -> Findings:
    """Find the first loss or gradient that is no finite number, and where it comes from."""
    for log in evidence.run.ranks:
        for event in log.select(NotFinite)[:1]:
            number = sum(backward.n <= event.n for backward in log.select(Backward))
            yield evidence.finding(
                "not-finite",
                event.at,
                f"{event.what} of backward pass {max(number, 1)} is {event.value}; {event.origin}",
                log.rank,
            )
            return
