"""The rule for losses and gradients that are nan or infinite."""

from __future__ import annotations

from stepladder.tools.check.events import Backward, NotFinite, OptimizerStep
from stepladder.tools.check.probe_settings import WEIGHT_HAS_IT
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule

UNWRITTEN = "not-finite.unwritten"


@run_rule("not-finite", UNWRITTEN)
def not_finite(evidence: RunEvidence) -> Findings:
    """Find the first loss or gradient that is no finite number, and where it comes from."""
    for log in evidence.ranks:
        for event in log.select(NotFinite)[:1]:
            number = sum(backward.n <= event.n for backward in log.select(Backward))
            text = f"{event.what} of backward pass {max(number, 1)} is {event.value}; "
            text += event.origin
            rule = "not-finite"
            if event.origin.endswith(WEIGHT_HAS_IT):
                was_trained = any(step.n < event.n for step in log.select(OptimizerStep))
                rule = rule if was_trained else UNWRITTEN
                text += ": an earlier step broke it" if was_trained else ", and no step before it"
            yield evidence.finding(rule, event.at, text, log.rank)
            return
