"""The cause of a tensor that differs although the samples and the learning rates are the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from stepladder.tools.check.events import Backward, Clipping
from stepladder.tools.parity.compare import FirstDifference, Runs, StepTriple, first_beyond
from stepladder.tools.parity.named_cause import NamedCause, processes
from stepladder.tools.parity.steps import GlobalStep, Tensors
from stepladder.tools.parity.tolerance import TensorTriple
from stepladder.tools.probe.events import CodeLine

# Gradients differ by a factor if what the factor does not explain is smaller than this share.
MAX_UNEXPLAINED_SHARE = 0.05
SAME_FACTOR = 0.01  # relative


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
    reference_values = elements(reference.grads, compared.grads)
    values = elements(compared.grads, reference.grads)
    reference_square = sum(value * value for value in reference_values)
    square = sum(value * value for value in values)
    if not reference_square or not square:
        return None
    pairs = list(zip(reference_values, values, strict=True))
    factor = sum(expected * value for expected, value in pairs) / reference_square
    unexplained = sum((factor * expected - value) ** 2 for expected, value in pairs)
    change = abs(factor - 1) * math.sqrt(reference_square)
    if math.sqrt(unexplained) > MAX_UNEXPLAINED_SHARE * min(change, math.sqrt(square)):
        return None
    return factor


def elements(tensors: Tensors, common: Tensors) -> list[float]:
    """Return the elements of the tensors that both runs have, in one list."""
    names = sorted(tensors.keys() & common.keys())
    return [value for name in names for value in tensors[name][1:]]


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
