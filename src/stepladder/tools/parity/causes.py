"""The kind of cause of the first difference, and the evidence for it in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import Backward, Clipping
from stepladder.tools.check.relations.gradients import common_elements, distance, fit_factor
from stepladder.tools.parity.compare import FirstDifference, Runs, StepTriple, first_beyond
from stepladder.tools.parity.steps import GlobalStep, RunSteps, Samples, Tensors
from stepladder.tools.parity.tolerance import TensorTriple
from stepladder.tools.probe.events import CodeLine

# Gradients differ by a factor if what the factor does not explain is smaller than this share.
MAX_UNEXPLAINED_SHARE = 0.05
SAME_FACTOR = 0.01  # relative


@dataclass(frozen=True)
class NamedCause:
    """A kind of cause, which has its texts in rules.toml.

    Args:
        evidence: What was measured.
        line: The line of the script that it comes from.
    """

    rule: str
    evidence: str
    line: CodeLine | None = None


def loader_line(run: RunSteps) -> CodeLine | None:
    """Return the line that made the loader; of a script without one, the first call of a model."""
    passes = run.recording.ranks[0].training_passes
    if passes:
        return passes[0].loader_line
    calls = run.steps[0].first.inputs
    return calls[0].at if calls else None


def processes(run: RunSteps) -> str:
    return format_count(run.world_size, "process")


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
            f"an epoch of {processes(runs.reference)} has "
            f"{runs.reference.steps_of_first_epoch} steps, of {processes(runs.compared)} "
            f"{runs.compared.steps_of_first_epoch}"
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


# -- tensors that differ although samples and learning rates are the same --------------------------


@dataclass(frozen=True)
class TensorEvidence:
    """The step at which a tensor differs first."""

    runs: Runs
    triple: StepTriple
    difference: FirstDifference

    @property
    def reference(self) -> GlobalStep:
        return self.triple.reference

    @property
    def compared(self) -> GlobalStep:
        return self.triple.compared

    @property
    def backward_line(self) -> CodeLine | None:
        return self.compared.first.backward_line

    def cause(self, rule: str, evidence: str, line: CodeLine | None = None) -> NamedCause:
        """Return a cause, at the line of the backward pass if no other is given."""
        text = f"step {self.compared.number}: {evidence}"
        return NamedCause(rule, text, line or self.backward_line)


def find_tensor_cause(evidence: TensorEvidence) -> NamedCause:
    """Return the first cause that explains the difference."""
    explanations = EXPLAINS_GRADIENTS
    if evidence.difference.quantity == "weight":
        explanations = EXPLAINS_WEIGHTS
    for explain in explanations:
        cause = explain(evidence)
        if cause is not None:
            return cause
    text = describe_deviation(evidence.difference)
    return NamedCause("unexplained", text, evidence.backward_line)


def describe_deviation(difference: FirstDifference) -> str:
    """Return how far a tensor differs, and how far it may."""
    deviation = difference.deviation
    assert deviation is not None
    where = f"step {difference.step}" if difference.step else "before the first step"
    kind = "gradient" if difference.quantity == "loss" else difference.quantity
    return (
        f"{where}: the {kind} of {deviation.name} differs by {100 * deviation.relative:.3g} %; "
        f"rounding explains {100 * deviation.allowed:.2g} %"
    )


def explain_replicas(evidence: TensorEvidence) -> NamedCause | None:
    name = name_replica_difference(evidence.compared, evidence.triple.epsilon)
    if not name:
        return None
    text = f"the gradient of {name} is not the same on all ranks"
    return evidence.cause("not-averaged", text)


def name_replica_difference(step: GlobalStep, epsilon: float) -> str:
    """Return the first parameter whose gradient, or weight, differs between ranks."""
    values = [rank_step.values for rank_step in step.ranks if rank_step.values is not None]
    for of_rank in values[1:]:
        name = first_difference(values[0].grads, of_rank.grads, epsilon)
        name = name or first_difference(values[0].weights, of_rank.weights, epsilon)
        if name:
            return name
    return ""


def first_difference(tensors: Tensors, peers_tensors: Tensors, epsilon: float) -> str:
    """Return the name of the first tensor that differs between two ranks, or ""."""
    triple = TensorTriple(tensors, peers_tensors, tensors, epsilon)
    beyond = first_beyond(triple.deviations())
    return beyond.name if beyond else ""


def explain_settings(evidence: TensorEvidence) -> NamedCause | None:
    """Name the first setting of the optimizer that differs."""
    reference = evidence.reference.values
    compared = evidence.compared.values
    if reference is None or compared is None:
        return None
    line = evidence.compared.first.end.at
    for reference_group, group in zip(reference.settings, compared.settings, strict=False):
        for name, reference_value in reference_group.items():
            value = group.get(name, math.nan)
            if not math.isclose(reference_value, value):
                text = f"{name} is {reference_value:g}, and {value:g}"
                return evidence.cause("optimizer-setting", text, line)
    return None


def explain_factor(evidence: TensorEvidence) -> NamedCause | None:
    factor = common_factor(evidence.reference, evidence.compared)
    if factor is None:
        return None
    text = f"all gradients are {factor:.4g} times those of {processes(evidence.runs.reference)}"
    return evidence.cause("loss-scaled", f"{text}{explain_number(evidence, factor)}")


def common_factor(reference: GlobalStep, compared: GlobalStep) -> float | None:
    """Return the factor by which all gradients differ; None where there is no single one."""
    # The first value is the norm.
    tensors = [{name: v[1:] for name, v in step.grads.items()} for step in (reference, compared)]
    pairs = common_elements(*tensors)
    factor = fit_factor(pairs)
    size = distance(pairs, 0.0)
    change = distance([(expected, factor * expected) for expected, _ in pairs])
    if not factor or distance(pairs, factor) > MAX_UNEXPLAINED_SHARE * min(change, size):
        return None
    return factor


def explain_number(evidence: TensorEvidence, factor: float) -> str:
    """Return where the factor between gradients comes from, if it is a known number."""
    ranks = evidence.runs.compared.world_size / evidence.runs.reference.world_size
    reference_passes = max(1, len(evidence.reference.first.select(Backward)))
    passes = len(evidence.compared.first.select(Backward)) / reference_passes
    known_factors = (
        (ranks, ": a sum over the ranks in place of a mean"),
        (1 / ranks, ": they are divided by the number of ranks twice"),
        (passes, f", as there are {passes:g} times as many backward passes in a step"),
    )
    for known, text in known_factors:
        if math.isclose(factor, known, rel_tol=SAME_FACTOR):
            return text
    return ""


def explain_clipping(evidence: TensorEvidence) -> NamedCause | None:
    first = evidence.compared.first
    if not first.clips_early:
        return None
    text = "clip_grad_norm_ is called before the last exchange of gradients"
    return evidence.cause("clip-before-average", text, first.select(Clipping)[0].at)


def explain_sizes(evidence: TensorEvidence) -> NamedCause | None:
    """Name batches of different sizes, whose means count the same."""
    if len(set(evidence.compared.sizes)) == 1:
        return None
    sizes = " and ".join(map(str, evidence.compared.sizes))
    text = f"the ranks have {sizes} samples, and their means count the same"
    return evidence.cause("loss-per-rank", text)


def explain_draws(evidence: TensorEvidence) -> NamedCause | None:
    """Name random numbers of the loop, if models were called on other inputs."""
    draw = evidence.runs.compared.find_loop_draw(evidence.compared)
    if draw is None or evidence.compared.input_rows == evidence.reference.input_rows:
        return None
    text = f"{draw.fn} is called in the loop over batches"
    return evidence.cause("random-input", text, draw.at)


def explain_loss(evidence: TensorEvidence) -> NamedCause | None:
    """Name a loss that is no mean over samples: nothing but the ranks' shares differs."""
    if not evidence.triple.has_other_loss:
        return None
    losses = " and ".join(f"{loss:.6g}" for loss in evidence.compared.rank_losses)
    text = (
        f"the ranks' losses are {losses}; {processes(evidence.runs.reference)} on the same samples "
        f"and weights: {evidence.reference.loss:.6g}"
    )
    return evidence.cause("loss-per-rank", text)


Explain = Callable[[TensorEvidence], NamedCause | None]
EXPLAINS_WEIGHTS: tuple[Explain, ...] = (explain_settings, explain_replicas)
EXPLAINS_GRADIENTS: tuple[Explain, ...] = (
    explain_replicas,
    explain_factor,
    explain_clipping,
    explain_sizes,
    explain_draws,
    explain_loss,
)
