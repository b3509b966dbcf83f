"""The kind of cause of the first difference, and the evidence for it in one sentence."""

from __future__ import annotations

from stepladder.tools.parity.compare import FirstDifference, Runs, StepTriple
from stepladder.tools.parity.named_cause import NamedCause, loader_line, processes
from stepladder.tools.parity.steps import GlobalStep, RunSteps, Samples
from stepladder.tools.parity.tensor_causes import (
    TensorEvidence,
    describe_deviation,
    find_tensor_cause,
)


def find_cause(runs: Runs, difference: FirstDifference) -> NamedCause:
    """Return the cause of the first difference."""
    if difference.quantity == "steps":
        return cause_of_steps(runs)
    if difference.quantity == "initial weight":
        first_line = runs.compared.steps[0].first.end.at
        return NamedCause("other-weights", describe_deviation(difference), first_line)
    triple = runs.step(difference.step)
    if difference.quantity == "samples":
        return cause_of_samples(runs, triple)
    if difference.quantity == "learning rate":
        return cause_of_rate(triple)
    return find_tensor_cause(TensorEvidence(runs, triple, difference))


def cause_of_steps(runs: Runs) -> NamedCause:
    """Return the cause where one run has made more steps."""
    counts = [f"{len(run.steps)} on {processes(run)}" for run in (runs.reference, runs.compared)]
    evidence = f"there are {' steps, and '.join(counts)}; all that both make are the same"
    return NamedCause("last-batch", evidence, loader_line(runs.compared))


def cause_of_samples(runs: Runs, triple: StepTriple) -> NamedCause:
    reference = triple.reference
    compared = triple.compared
    ends_epoch = is_last(runs.reference, reference) or is_last(runs.compared, compared)
    if reference.epoch != compared.epoch or (ends_epoch and reference.number > 1):
        rule = "last-batch"
    elif reference.samples.count != compared.samples.count:
        rule = "batch-size"
    elif repeated_samples(triple) <= 0 and have_same_epoch(runs, triple):
        rule = "other-order"
    else:
        rule = "other-samples"
    return NamedCause(rule, describe_samples(runs, triple), loader_line(runs.compared))


def describe_samples(runs: Runs, triple: StepTriple) -> str:
    """Return how the samples of a step differ."""
    reference = triple.reference
    compared = triple.compared
    if reference.epoch != compared.epoch:
        return (
            f"an epoch of {processes(runs.reference)} has {len(runs.reference.epochs[0])} steps, "
            f"of {processes(runs.compared)} {len(runs.compared.epochs[0])}"
        )
    counts = (
        f"step {reference.number} trains {reference.samples.count} samples on "
        f"{processes(runs.reference)}, {compared.samples.count} on {processes(runs.compared)}"
    )
    repeated = repeated_samples(triple)
    if repeated > 0:
        return f"{counts}; {repeated} of these are repeated"
    if reference.samples.count != compared.samples.count:
        repeated = epoch_samples(runs.compared, compared).repeated
        return f"{counts}; {repeated} of its epoch are repeated" if repeated else counts
    return f"{counts}: {count_different(triple)} of them are others"


def repeated_samples(triple: StepTriple) -> int:
    """Return how many more samples are repeated than in the reference."""
    return triple.compared.samples.repeated - triple.reference.samples.repeated


def have_same_epoch(runs: Runs, triple: StepTriple) -> bool:
    """Return whether the epoch of a step has the same samples in both runs."""
    reference = epoch_samples(runs.reference, triple.reference)
    return reference.is_same(epoch_samples(runs.compared, triple.compared))


def count_different(triple: StepTriple) -> int:
    """Return how many samples of a step are not in the other run's step."""
    reference = triple.reference.samples
    compared = triple.compared.samples
    if reference.rows.total() and compared.rows.total():
        return (reference.rows - compared.rows).total()
    return (reference.numbers - compared.numbers).total()


def is_last(run: RunSteps, step: GlobalStep) -> bool:
    """Return whether a step is the last one of its epoch."""
    following = run.steps[step.number : step.number + 1]
    return not following or following[0].epoch != step.epoch


def epoch_samples(run: RunSteps, step: GlobalStep) -> Samples:
    steps = [peer for peer in run.steps if peer.epoch == step.epoch]
    return sum((peer.samples for peer in steps), Samples())


def cause_of_rate(triple: StepTriple) -> NamedCause:
    reference = triple.reference
    compared = triple.compared
    reference_rate = reference.rates[0]
    rate = compared.rates[0]
    evidence = f"step {reference.number} has {reference_rate:.6g}, and {rate:.6g}"
    if reference_rate:
        evidence += f": {rate / reference_rate:.4g} times as much"
    if reference.number > 1:
        evidence += "; before this step they are equal, so the schedule differs"
    return NamedCause("learning-rate", evidence, compared.first.end.at)
