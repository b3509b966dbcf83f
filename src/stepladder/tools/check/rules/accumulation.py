"""Rules for gradient accumulation: several backward passes per optimizer step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from stepladder.tools.check.events import (
    Backward,
    BeforeStep,
    Forward,
    LocalGradients,
    OptimizerStep,
    ZeroGrad,
)
from stepladder.tools.check.recording import EventSequence, RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule, run_rule
from stepladder.tools.check.rules.model import is_wrapped
from stepladder.tools.probe.events import ProbeEvent

# Batches of which none has targets left out differ less, but for the last one of an epoch.
MAX_EVEN_RATIO = 1.25
MIN_UNEVEN_STEPS = 3
OF_A_MODULE = -1  # in place of an optimizer's number, where a module's zero_grad was called
SAME_FACTOR = 0.01  # the relative difference of two factors that are the same


@dataclass
class Window(EventSequence):
    """What a rank did between two optimizer steps; the last event is the second one."""

    events: list[ProbeEvent]

    @cached_property
    def backwards(self) -> list[Backward]:
        return self.select(Backward)

    @cached_property
    def forwards(self) -> list[Forward]:
        """The forward passes of models that keep a graph."""
        return [event for event in self.select(Forward) if event.grad]

    @property
    def is_of_one_line(self) -> bool:
        return len({str(event.at) for event in self.backwards}) == 1

    @property
    def discarding_calls(self) -> list[ZeroGrad]:
        """The calls of zero_grad that discard gradients of this window.

        They are calls of the optimizer that makes the step, or of a module.
        """
        owners = {step.optimizer for step in self.select(OptimizerStep)}
        if self.is_of_one_line:
            owners.add(OF_A_MODULE)
        first, last = self.backwards[0].n, self.backwards[-1].n
        calls = [event for event in self.select(ZeroGrad) if first < event.n < last]
        return [event for event in calls if event.optimizer in owners]

    @property
    def factor(self) -> float | None:
        """The factor by which the script scales the gradients before the step, if it is one."""
        left = self.select(LocalGradients)[-1:]
        used = self.select(BeforeStep)[-1:]
        if not left or not used:
            return None
        pairs = zip(left[0].sums, used[0].sums, strict=False)
        return single_factor([after / before for before, after in pairs if before])


def single_factor(factors: list[float]) -> float | None:
    """Return the factor that all of these are, but for rounding; None if they differ."""
    is_one = factors and max(factors) - min(factors) <= SAME_FACTOR * abs(max(factors))
    return factors[0] if is_one else None


def accumulating_windows(log: RankLog) -> list[Window]:
    """Return the windows with several backward passes, each after a forward pass."""
    windows: list[Window] = []
    events: list[ProbeEvent] = []
    for event in log.events:
        events.append(event)
        if isinstance(event, OptimizerStep):
            windows.append(Window(events))
            events = []
    return [
        window
        for window in windows
        if len(window.backwards) > 1 and len(window.forwards) >= len(window.backwards)
    ]


def regular_windows(windows: list[Window]) -> list[Window]:
    """Return the windows of one line with the most frequent number of backward passes.

    This leaves out the remainder at the end of an epoch.
    """
    of_one_line = [window for window in windows if window.is_of_one_line]
    if not of_one_line:
        return []
    lengths = Counter(len(window.backwards) for window in of_one_line)
    usual_length = lengths.most_common(1)[0][0]
    return [window for window in of_one_line if len(window.backwards) == usual_length]


@run_rule("gradients-discarded")
def gradients_discarded(evidence: RunEvidence) -> Findings:
    windows = accumulating_windows(evidence.rank_0)
    discarding = [w for w in windows if len(w.discarding_calls) >= len(w.backwards) - 1]
    if len(discarding) >= 2 and len(discarding) == len(windows):
        count = len(discarding[0].backwards)
        yield evidence.finding(
            "gradients-discarded",
            discarding[0].discarding_calls[0].at,
            f"{count} backward passes per step, and zero_grad between them: the gradients of "
            f"{count - 1} of {count} are thrown away ({len(discarding)} steps seen)",
        )


@rank_rule("accumulation-sync")
def accumulation_sync(evidence: RunEvidence) -> Findings:
    log = evidence.rank_0
    if not is_wrapped(log):
        return
    windows = regular_windows(accumulating_windows(log))
    # The wrapper averages gradients after as many forward passes.
    costly = [w for w in windows if sum(e.sync for e in w.forwards) >= len(w.backwards)]
    if costly and len(costly) == len(windows):
        backwards = costly[0].backwards
        count = len(backwards)
        yield evidence.finding(
            "accumulation-sync",
            backwards[0].at,
            f"{count} backward passes per step, and each of them averages all gradients over the "
            f"ranks: {count - 1} of {count} for nothing ({len(costly)} steps seen)",
        )


@run_rule("accumulation-mean")
def accumulation_mean(evidence: RunEvidence) -> Findings:
    log = evidence.rank_0
    windows = regular_windows(accumulating_windows(log))
    is_scale_unknown = any(event.scale is None for w in windows for event in w.backwards)
    if len(windows) < 2 or is_scale_unknown:
        return
    # The factor before each step; clipping has many.
    factors = [window.factor for window in windows if window.factor is not None]
    factor = single_factor(factors) or 1.0
    total_scales = [factor * sum(event.scale or 0.0 for event in w.backwards) for w in windows]
    if any(abs(total - 1) <= 0.01 for total in total_scales):
        return
    first = windows[0].backwards
    if abs(total_scales[0] - len(first)) < SAME_FACTOR:
        weight = "is divided by nothing"
    else:
        weight = f"has weight {first[0].scale:.4g}"
    yield evidence.finding(
        "accumulation-mean",
        first[0].at,
        f"{len(first)} backward passes per step; the mean loss of each {weight}, so the step's "
        f"gradient is {total_scales[0]:.4g} times the mean ({len(windows)} steps seen)",
    )


@rank_rule("uneven-targets")
def uneven_targets(evidence: RunEvidence) -> Findings:
    """Find means of two ranks over different numbers of targets, of which some are left out."""
    passes = align(log.select(Backward) for log in evidence.first_ranks if is_wrapped(log))
    weights_of_steps = [[event.target_weight or 0.0 for event in events] for events in passes]
    ratios = [max(weights) / min(weights) for weights in weights_of_steps if all(weights)]
    uneven = [ratio for ratio in ratios if ratio > MAX_EVEN_RATIO]
    if len(uneven) < max(MIN_UNEVEN_STEPS, len(ratios) / 2):
        return
    yield evidence.finding(
        "uneven-targets",
        evidence.rank_0.select(Backward)[0].at,
        f"in {len(uneven)} of {len(ratios)} backward passes a target of one rank counts more than "
        f"one of another, up to {max(uneven):.3g} times as much",
    )


@run_rule("accumulation-mean.leftover")
def leftover_gradients(evidence: RunEvidence) -> Findings:
    """Find steps that begin with the gradients of the last backward passes of an epoch."""
    log = evidence.rank_0
    windows = [w for w in accumulating_windows(log) if not w.discarding_calls]
    usual = [len(window.backwards) for window in regular_windows(windows)]
    ends = [
        one_pass.end.n for one_pass in log.training_passes if one_pass.end and one_pass.is_complete
    ]
    for window in windows if len(usual) >= 2 else []:
        first, *_, last = window.backwards
        is_over_two_epochs = any(first.n < end < last.n for end in ends)
        more = len(window.backwards) - usual[0]
        if is_over_two_epochs and more > 0:
            yield evidence.finding(
                "accumulation-mean.leftover",
                last.at,
                f"{usual[0]} backward passes per step, but the first step after an "
                f"epoch has {len(window.backwards)}: {more} of the epoch before had no step",
            )
            return


@rank_rule("mean-divided-twice")
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
