"""R2: with frozen weights the mean gradient of an epoch is that of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean

from stepladder.tools.check.events import BeforeStep, Fetch, MeanGradient, OptimizerStep
from stepladder.tools.check.recording import RankLog, Recording
from stepladder.tools.check.relations.frozen_runs import SAME_RATIO, FrozenRuns, Violation
from stepladder.tools.check.relations.samples_read import training_samples, trains_one_data_set
from stepladder.tools.probe.events import CodeLine

NOISE_FACTOR = 5.0
MIN_RELATIVE_DIFFERENCE = 1e-3
SHIFT_FACTOR = 4.0
ROUNDING = 5e-3  # of a mean gradient, in 16-bit numbers too
NO_MEAN = "the loss is no mean over samples, as with weights, ignored targets or pairs"
FLAT_PARAMETER = "_flat_param"  # of FSDP1: a part, of which nobody knows the whole
MAX_LAYERS = 3  # that are shown

Pairs = list[tuple[float, float]]
Vector = dict[str, list[float]]  # some elements of gradients, by the parameter's name


@dataclass(frozen=True)
class Gradient:
    """The mean gradient of one optimizer on one rank.

    Args:
        mean: The elements that were recorded.
        deviation: The standard deviation of a step's gradient, as a norm.
        steps: The number of steps.
        rows: The number of rows of all steps.
    """

    mean: Vector
    deviation: float
    steps: int
    rows: float

    @property
    def norm(self) -> float:
        return math.hypot(*chain.from_iterable(self.mean.values()))


def read_gradients(log: RankLog) -> dict[int, Gradient]:
    """Return the mean gradients of a rank, by the number of the optimizer."""
    gradients = {}
    for event in log.select(MeanGradient):
        sums = event.sums.items()
        mean = {name: [value / event.rows for value in values] for name, values in sums}
        gradient = Gradient(mean, 0.0, event.steps, event.rows)
        variance = max(0.0, event.squares / event.rows - gradient.norm**2)
        gradients[event.optimizer] = replace(gradient, deviation=math.sqrt(variance))
    return gradients


def gradients_of_run(run: Recording) -> dict[int, Gradient]:
    """Return the mean gradients over all ranks and rows, by the number of the optimizer."""
    by_rank = [read_gradients(log) for log in run.ranks]
    merged = {}
    for number, first in by_rank[0].items():
        parts = [gradients[number] for gradients in by_rank if number in gradients]
        mean = {}
        for name in first.mean:
            having = [part for part in parts if name in part.mean]
            rows = [part.rows for part in having]
            elements = zip(*(part.mean[name] for part in having), strict=False)
            mean[name] = [fmean(values, rows) for values in elements]
        merged[number] = replace(first, mean=mean, rows=sum(part.rows for part in parts))
    return merged


def common_elements(first: Vector, second: Vector) -> Pairs:
    """Return the elements that both have, in pairs."""
    names = sorted(first.keys() & second.keys())
    return [pair for name in names for pair in zip(first[name], second[name], strict=False)]


def distance(pairs: Pairs, factor: float = 1.0) -> float:
    """Return the norm of the difference between the second values and a multiple of the first."""
    return math.hypot(*(factor * one - other for one, other in pairs))


def fit_factor(pairs: Pairs) -> float:
    """Return how many times the first values the second ones are; 0 if the first are all 0."""
    square = sum(one * one for one, _ in pairs)
    return sum(one * other for one, other in pairs) / square if square else 0.0


def violations(runs: FrozenRuns, has_same_batches: bool = False) -> Iterator[Violation]:
    """Yield how the mean gradients of ranks differ from that of one process.

    Args:
        runs: The runs.
        has_same_batches: Whether all ranks together have the batches of one process. If nothing is
            drawn in the training, the gradients are then the same but for rounding.
    """
    reference = gradients_of_run(runs.reference)
    shuffled = gradients_of_run(runs.shuffled or runs.reference)
    samples = training_samples(runs.reference)
    compared = training_samples(runs.compared)
    if not are_comparable(runs):
        return
    moved = compared.share_moved(samples)
    is_exact = has_same_batches and moved == 0 and not draws(runs.reference.ranks[0])
    merged = gradients_of_run(runs.compared)
    for rank, log in enumerate(runs.compared.ranks):
        own = read_gradients(log)
        for number in own.keys() & reference.keys() & shuffled.keys() & merged.keys():
            # Ranks with the batches of one process may have shares of unequal sizes.
            gradient = merged[number] if has_same_batches else own[number]
            # Those of an evaluation, too, would be others.
            has_same_rows = merged[number].rows == reference[number].rows
            pair = (reference[number], shuffled[number])
            violation = compare(*pair, gradient, moved, is_exact and has_same_rows, runs.base)
            if has_same_batches:
                violation = violation or find_lost(*pair, own[number])
            if violation and not is_scaled_by_rate(runs, rank, number, violation.ratio):
                text = f"rank {rank}: {violation.evidence}"
                yield replace(violation, line=line_of_step(log, number), evidence=text)
                return


def is_scaled_by_rate(runs: FrozenRuns, rank: int, number: int, ratio: float) -> bool:
    """Return whether a smaller learning rate makes up for gradients that are a sum.

    A larger one does not make up for gradients that are too small: it is scaled on purpose.
    """
    rates = [
        [event.lr[0] for event in log.select(OptimizerStep) if event.optimizer == number]
        for log in (runs.reference.ranks[0], runs.compared.ranks[rank])
    ]
    return (
        all(rates)
        and ratio > 1
        and math.isclose(rates[0][0], ratio * rates[1][0], rel_tol=SAME_RATIO)
    )


def count_compared(runs: FrozenRuns) -> int:
    """Return how many steps of one process can be compared."""
    if not are_comparable(runs):
        return 0
    return sum(gradient.steps for gradient in gradients_of_run(runs.reference).values())


def are_comparable(runs: FrozenRuns) -> bool:
    """Return whether the ranks have gradients of whole tensors, and of one process's data."""
    parameters = {name for _, event in runs.compared.select(MeanGradient) for name in event.sums}
    are_whole = not any(FLAT_PARAMETER in name for name in parameters)
    return trains_one_data_set(runs) and are_whole


def draws(log: RankLog) -> bool:
    """Return whether random numbers are drawn between steps, or may be."""
    passes = [one_pass.select(BeforeStep) for one_pass in log.training_passes]
    states = [[step.random for step in steps] for steps in passes if len(steps) > 1]
    fetches = [event for event in log.worker_events if isinstance(event, Fetch)]
    return (
        not states
        or any(one != first for first, *others in states for one in others)
        or any(event.used for event in fetches)
    )


def line_of_step(log: RankLog, number: int) -> CodeLine | None:
    steps = [event.at for event in log.select(BeforeStep) if event.optimizer == number]
    return steps[0] if steps else None


def shift_by_samples(reference: Gradient, moved: float | None) -> float:
    """Return how far other samples may move the mean gradient.

    Samples that make shares equal, or that are dropped for it, move it by their deviation. Where
    nothing is known of the samples, they are others: it moves by its standard error.
    """
    steps = max(1, reference.steps)
    if moved is None:
        return reference.deviation / math.sqrt(steps)
    return moved * reference.deviation * math.sqrt(reference.rows / steps)


def find_lost(*gradients: Gradient) -> Violation | None:
    """Return which parameter has no gradient in the last of three runs, and has one in others."""
    reference, shuffled, compared = [item.mean.keys() for item in gradients]
    if compared < reference and (lost := sorted(reference & shuffled - compared)):
        return Violation("gradients", None, math.inf, f"{lost[0]} has no gradient")
    return None


def compare(
    reference: Gradient,
    shuffled: Gradient,
    gradient: Gradient,
    moved: float | None,
    is_exact: bool = False,
    base: str = "one process",
) -> Violation | None:
    """Return how a rank's mean gradient differs from that of one process.

    Args:
        reference: That of one process.
        shuffled: That of one process with other random numbers.
        gradient: That of the rank.
        moved: The share of samples that were read more or less often on all ranks.
        is_exact: Whether both are the same but for rounding.
        base: What the rank is compared with, in words.
    """
    norm = reference.norm
    pairs = common_elements(reference.mean, gradient.mean)
    if not norm or not math.isfinite(norm) or not pairs:
        return None
    noise = distance(common_elements(reference.mean, shuffled.mean)) / norm
    shift = shift_by_samples(reference, moved) / norm
    allowed = NOISE_FACTOR * noise + SHIFT_FACTOR * shift + MIN_RELATIVE_DIFFERENCE
    if is_exact:
        allowed = ROUNDING
    difference = distance(pairs) / norm
    if not difference > allowed:
        return None
    ratio = fit_factor(pairs)
    is_multiple = distance(pairs, ratio) / norm <= allowed * abs(ratio)
    layers = [
        f"{name:30} differs by {100 * share:.3g} %" for name, share in others(reference, gradient)
    ]
    text = (
        f"with the same weights the mean gradient of all steps is {ratio:.3g} times that of "
        f"{base}, and differs by {100 * difference:.3g} %; other random numbers change it by "
        f"{100 * noise:.2g} %"
    )
    if is_exact:
        text += f". Both have the same samples in each step: {NO_MEAN}"
    evidence = "\n".join([text, *layers[:MAX_LAYERS]])
    known_ratio = ratio if is_multiple else math.nan
    return Violation("gradients", None, difference / allowed, evidence, known_ratio)


def others(reference: Gradient, gradient: Gradient) -> list[tuple[str, float]]:
    """Return by how much of its norm the gradient of each parameter differs, the most first."""
    differences: list[tuple[str, float]] = []
    for name in reference.mean.keys() & gradient.mean.keys():
        pairs = list(zip(reference.mean[name], gradient.mean[name], strict=False))
        norm = math.hypot(*reference.mean[name])
        differences.append((name, distance(pairs) / norm if norm else math.inf))
    return sorted(differences, key=lambda pair: (-pair[1], pair[0]))
