"""The rule for gradients that the script exchanges by hand: they must be averages of all ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepladder.tools.check.events import Backward, BeforeStep, LocalGradients, OptimizerBuilt
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule
from stepladder.tools.check.rules.rank_values import WORLD_SIZE, depends_on
from stepladder.tools.check.script_source import keyword_value

ROUNDING_OF_GRADIENTS = 1e-3  # relative, of gradients that are exchanged in half precision
MIN_STEPS = 3
IGNORE_SCALE = ("Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop")  # of gradients
Sums = Sequence[float]


@dataclass(frozen=True)
class ExchangedStep:
    """The gradients of one step: those that its backward pass left, and those that it uses."""

    step: BeforeStep
    local: Sums
    scale: float | None


def exchanged_steps(log: RankLog) -> Iterator[ExchangedStep]:
    """Yield the steps of a rank that follow a backward pass whose gradients were recorded."""
    local: Sums = []
    scale: float | None = None
    for event in log.events:
        if isinstance(event, Backward):
            scale = event.scale
        elif isinstance(event, LocalGradients):
            local = event.sums
        elif isinstance(event, BeforeStep):
            if local and len(local) == len(event.sums):
                yield ExchangedStep(event, local, scale)
            local = []


@rank_rule("not-wrapped.one", "accumulation-mean.ranks", "mean-divided-twice")
def exchanged_by_hand(evidence: RunEvidence) -> Findings:
    """Find exchanged gradients that are a sum, a part of an average, or those of one rank."""
    size = evidence.run.world_size
    steps = align(list(exchanged_steps(log)) for log in evidence.ranks)
    kinds = list(map(kind_of_exchange, steps))
    if size != len(evidence.ranks) or len(kinds) < MIN_STEPS or len(set(kinds)) > 1:
        return
    kind = kinds[0]
    first = steps[0][0]
    if kind.isdigit():
        yield evidence.finding(
            "not-wrapped.one",
            first.step.at,
            f"in all of {len(kinds)} steps the gradients are those of rank {kind} alone",
        )
    elif kind == "part":
        yield evidence.finding(
            "mean-divided-twice",
            first.step.at,
            f"in all of {len(kinds)} steps the gradients are the average over the ranks, divided "
            f"by {size} once more",
        )
    elif kind == "sum" and is_of_mean_loss(first) and not follows_world_size(evidence):
        yield evidence.finding(
            "accumulation-mean.ranks",
            first.step.at,
            f"in all of {len(kinds)} steps the gradients are the sum over {size} ranks, each of a "
            f"mean loss, and not the average",
            severity="note" if ignores_scale(evidence) else None,
        )


def kind_of_exchange(steps: tuple[ExchangedStep, ...]) -> str:
    """Return what the gradients of a step are: "sum", "part", the number of a rank, or nothing."""
    size = len(steps)
    used = steps[0].step.sums
    locals_of_ranks = [step.local for step in steps]
    first = locals_of_ranks[0]
    is_exchanged = all(are_equal(used, step.step.sums) for step in steps)
    if not is_exchanged or any(are_equal(first, other) for other in locals_of_ranks[1:]):
        return ""
    total = [sum(values) for values in zip(*locals_of_ranks, strict=True)]
    if are_equal(used, total):
        return "sum"
    if are_equal(used, [value / size**2 for value in total]):
        return "part"
    alone = (rank for rank, local in enumerate(locals_of_ranks) if are_equal(used, local))
    return str(next(alone, ""))


def are_equal(first: Sums, second: Sums) -> bool:
    """Return whether sums of gradients are known, and the same but for rounding."""
    if not first or len(first) != len(second):
        return False
    tolerance = ROUNDING_OF_GRADIENTS * max(map(abs, [*first, *second]))
    return all(abs(a - b) <= tolerance for a, b in zip(first, second, strict=True))


def is_of_mean_loss(step: ExchangedStep) -> bool:
    return step.scale is not None and abs(step.scale - 1) < ROUNDING_OF_GRADIENTS


def ignores_scale(evidence: RunEvidence) -> bool:
    """Return whether an optimizer divides by the size of gradients."""
    return any(event.cls in IGNORE_SCALE for event in evidence.rank_0.select(OptimizerBuilt))


def follows_world_size(evidence: RunEvidence) -> bool:
    """Return whether a learning rate is computed from the number of ranks."""
    classes = {event.cls for event in evidence.rank_0.select(OptimizerBuilt)}
    calls = evidence.source.calls(*classes)
    rates = [keyword_value(call, "lr") or argument(call, 1) for _, call in calls]
    return any(rate and depends_on(rate, WORLD_SIZE, evidence.source) for rate in rates)


def argument(call: ast.Call, index: int) -> ast.expr | None:
    return call.args[index] if len(call.args) > index else None
