"""Rules for ranks that hold other samples, or whose targets contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul, sub
from statistics import correlation, fmean, pstdev, pvariance

from stepladder.tools.check.events import Draw, LinearFit
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, rank_rule, run_rule
from stepladder.tools.check.rules.model import exchanges_gradients
from stepladder.tools.probe.events import CodeLine

ROWS_PER_INPUT = 4  # at least, of which a fit is made
MIN_TESTED_ROWS = 30
MIN_EXPLAINED = 0.3  # of the variance: a fit of a rank's own rows that counts
MAX_EXCHANGED = 0.25  # of what a fit of the rank's own rows explains
MAX_SHIFT = 0.5  # of the mean of an input, in standard deviations
MAX_SPREAD = 2.0  # a standard deviation divided by that on the other rank
MIN_READ_AGAIN = 10  # samples that are read twice by one rank, and that are read by both
MAX_CORRELATION = 0.5  # of samples that have no more in common than their index


@run_rule("own-task")
def own_task(evidence: RunEvidence) -> Findings:
    """Find ranks of which each learns another function of inputs that are distributed alike.

    The rows of a rank's first training pass make a linear fit, which holds for its other rows, and
    not at all for those of the other rank.
    """
    ranks = evidence.run.ranks
    if not evidence.has_several_ranks or not all(map(exchanges_gradients, ranks)):
        return
    for first_pass, second_pass, *_ in evidence.training_passes()[:1]:
        first = fit_of(ranks[0], first_pass)
        second = fit_of(ranks[1], second_pass)
        has_same_data = first_pass.start.fingerprint == second_pass.start.fingerprint
        if first is None or second is None or has_same_data:
            return
        if not are_comparable(first, second):
            return
        own = min(explained(first, first), explained(second, second))
        exchanged = max(explained(first, second), explained(second, first))
        if own >= MIN_EXPLAINED and exchanged <= MAX_EXCHANGED * own:
            yield evidence.finding(
                "own-task",
                line_of_draws(ranks[0], first_pass),
                f"a linear fit of a rank's samples explains at least {own:.0%} of the variance of "
                f"its other targets, and at most {max(exchanged, 0.0):.0%} of that on the other "
                f"rank",
            )


@rank_rule("own-task.samples")
def own_samples(evidence: RunEvidence) -> Findings:
    """Find a data set of which two ranks hold unrelated samples under the same indices.

    A sample that is drawn anew each time it is read says nothing of the data set. Numbers that the
    script draws stand in for data, so for them this is a note.
    """
    if any(own_task(evidence)):
        return
    first, second = map(constant_samples, evidence.first_ranks)
    common = first.keys() & second.keys()
    sums = [[samples[index][1] for index in common] for samples in (first, second)]
    if are_unrelated(*sums):
        log = evidence.rank_0
        first_pass = log.training_passes[0]
        drawn = {event.fn for event in log.select(Draw) if event.n < first_pass.start.n}
        yield evidence.finding(
            "own-task.samples",
            line_of_draws(log, first_pass),
            f"rank 0 and rank 1 have read {len(common)} samples by the same index in training, and "
            f"each time other ones",
            severity="note" if drawn - {"randperm"} else None,
        )


@rank_rule("own-task.samples")
def own_held_samples(evidence: RunEvidence) -> Findings:
    """Find a data set in memory of which two ranks hold unrelated samples under the same indices.

    It needs no sample that both ranks have read: without set_epoch there is none.
    """
    if any(own_task(evidence)) or any(own_samples(evidence)):
        return
    for first, second, *_ in evidence.training_passes()[:1]:
        is_divided = first.is_divided and second.is_divided
        if is_divided and are_unrelated(first.start.held, second.start.held):
            yield evidence.finding(
                "own-task.samples",
                line_of_draws(evidence.rank_0, first),
                f"rank 0 and rank 1 hold {first.start.base_length} samples each, and other ones "
                f"by the same index",
                severity="note",
            )


def are_unrelated(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether sums of samples have no more in common than their index."""
    if len(first) != len(second) or len(first) < MIN_READ_AGAIN:
        return False
    if not pstdev(first) or not pstdev(second):
        return False
    return correlation(first, second) < MAX_CORRELATION


def constant_samples(log: RankLog) -> dict[int, tuple[str, float]]:
    """Return the hash and the sum of each sample in the passes that a sampler divides.

    There are none if a sample has changed, or if too few were read twice.
    """
    samples: dict[int, tuple[str, float]] = {}
    read_again = 0
    for one_pass in log.training_passes:
        if not one_pass.is_divided:
            continue
        for batch in one_pass.batches:
            rows = zip(batch.rows, batch.sums, strict=False)
            for index, (row, total) in zip(batch.indices or (), rows, strict=False):
                if index not in samples:
                    samples[index] = (row, total)
                    continue
                read_again += 1
                if samples[index][0] != row:
                    return {}
    if read_again < MIN_READ_AGAIN:
        return {}
    return samples


def fit_of(log: RankLog, one_pass: LoaderPass) -> LinearFit | None:
    """Return the fit of a pass, if it has enough rows."""
    for fit in log.select(LinearFit):
        if fit.number != one_pass.number:
            continue
        is_large = fit.count >= ROWS_PER_INPUT * len(fit.inputs)
        tested_rows = len(fit.inputs[0])
        if is_large and tested_rows >= MIN_TESTED_ROWS:
            return fit
    return None


def line_of_draws(log: RankLog, one_pass: LoaderPass) -> CodeLine | None:
    """Return the last line before a pass that draws numbers; that of the loader if none does."""
    line = one_pass.loader_line
    for event in log.select(Draw):
        if event.n < one_pass.start.n:
            line = event.at
    return line


def are_comparable(first: LinearFit, second: LinearFit) -> bool:
    """Return whether two ranks have the same classes, and inputs that are distributed alike."""
    if classes_of(first) != classes_of(second):
        return False
    if len(first.inputs) != len(second.inputs):
        return False
    for column, other in zip(first.inputs, second.inputs, strict=True):
        spreads = sorted(map(pstdev, (column, other)))
        shift = abs(fmean(column) - fmean(other))
        if shift > MAX_SHIFT * spreads[1]:
            return False
        if spreads[1] > MAX_SPREAD * spreads[0]:
            return False
    return True


def classes_of(fit: LinearFit) -> list[bool]:
    """Return for each output whether any target is not 0."""
    return list(map(any, fit.targets))


def explained(fit: LinearFit, tested: LinearFit) -> float:
    """Return the share of the variance of another fit's tested targets that a fit explains."""
    error = 0.0
    variance = 0.0
    rows = list(zip(*tested.inputs, strict=True))
    for weights, targets in zip(fit.weights, tested.targets, strict=True):
        predicted = [sum(map(mul, row, weights)) for row in rows]
        errors = list(map(sub, predicted, targets))
        error += fmean(map(mul, errors, errors))
        variance += pvariance(targets)
    if variance == 0:
        return 0.0
    return 1 - error / variance
