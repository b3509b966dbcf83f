"""The rule for means that are divided once more: by samples, or by the number of ranks."""

from __future__ import annotations

from stepladder.tools.check.events import Backward
from stepladder.tools.check.rules.accumulation import accumulating_windows
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.check.rules.model import is_wrapped
from stepladder.tools.check.rules.shown_metrics import first_certain, shown_means_by_samples


@run_rule("mean-divided-twice")
def mean_divided_twice(evidence: RunEvidence) -> Findings:
    shown = shown_means_by_samples(evidence)
    yield from first_certain(evidence, "mean-divided-twice", shown)
    if evidence.has_several_ranks:
        yield from loss_divided_by_ranks(evidence)


def loss_divided_by_ranks(evidence: RunEvidence) -> Findings:
    """Find losses that are divided by the number of ranks before a wrapper averages gradients.

    Where gradients are accumulated, a loss may be divided by the number of backward passes.
    """
    log = evidence.rank_0
    size = evidence.run.world_size
    backwards = log.select(Backward)
    divided = [e for e in backwards if e.scale and abs(e.scale * size - 1) < 1e-6]
    if len(divided) < 2 or len(divided) < len(backwards) or accumulating_windows(log):
        return
    if is_wrapped(log):
        yield evidence.finding(
            "mean-divided-twice",
            divided[0].at,
            f"the mean loss is divided by {size} ranks in {len(divided)} of {len(backwards)} "
            f"backward passes, and then the wrapper averages gradients",
        )
