"""The first difference between two runs: samples, learning rates, losses, gradients, weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from stepladder.tools.parity.steps import GlobalStep, RunSteps, Samples, Tensors
from stepladder.tools.parity.tolerance import SINGLE_EPSILON, Deviation, NoiseHistory, TensorTriple

Quantity = Literal[
    "initial weight", "samples", "learning rate", "steps", "loss", "gradient", "weight"
]
# The tensors of a step, in the order in which they are compared.
TENSORS: dict[Quantity, Callable[[GlobalStep], Tensors]] = {
    "gradient": attrgetter("grads"),
    "weight": attrgetter("weights"),
}
Histories = defaultdict[Quantity, NoiseHistory]  # the noise of rounding up to a step
SAME_RATE = 1e-6  # relative: schedules round, too


@dataclass(frozen=True)
class Runs:
    """The two runs that are compared, and a perturbed reference, which shows rounding noise."""

    reference: RunSteps
    compared: RunSteps
    perturbed: RunSteps

    def step(self, number: int) -> StepTriple:
        index = number - 1
        return StepTriple(
            self.reference.steps[index], self.compared.steps[index], self.perturbed.steps[index]
        )

    @property
    def common_steps(self) -> int:
        runs = (self.reference, self.compared, self.perturbed)
        return min(len(run.steps) for run in runs)

    @property
    def repeats(self) -> bool:
        """Whether the reference, run again, has the same weights and samples at its beginning."""
        if self.reference.initial != self.perturbed.initial:
            return False
        if not self.common_steps:
            return True
        first = self.step(1)
        return samples_agree(first.reference.samples, first.perturbed.samples)


@dataclass(frozen=True)
class StepTriple:
    """One step of all runs."""

    reference: GlobalStep
    compared: GlobalStep
    perturbed: GlobalStep

    @property
    def epsilon(self) -> float:
        """The rounding unit of the coarsest values of these steps."""
        steps = (self.reference, self.compared)
        recorded = [step.values.epsilon for step in steps if step.values is not None]
        return max([SINGLE_EPSILON, *recorded])

    @property
    def loss(self) -> Deviation | None:
        """The deviation of the loss; None where one is not known."""
        reference = self.reference.loss
        compared = self.compared.loss
        perturbed = self.perturbed.loss
        if reference is None or compared is None or perturbed is None:
            return None
        size = abs(reference) or 1.0
        relative = abs(reference - compared) / size
        noise = abs(reference - perturbed) / size
        return Deviation("loss", relative, noise, self.epsilon)

    @property
    def has_other_loss(self) -> bool:
        return self.loss is not None and self.loss.is_beyond_rounding

    def deviations(self, tensors_of: Callable[[GlobalStep], Tensors]) -> list[Deviation]:
        """Return the deviations of gradients as the optimizer gets them, or of weights after it."""
        reference, compared, perturbed = map(
            tensors_of, (self.reference, self.compared, self.perturbed)
        )
        return TensorTriple(reference, compared, perturbed, self.epsilon).deviations()


@dataclass(frozen=True)
class FirstDifference:
    """The first difference.

    Args:
        step: The number of the step.
        quantity: What differs.
        deviation: The first tensor that differs; None if samples, rates or step counts differ.
    """

    step: int
    quantity: Quantity
    deviation: Deviation | None = None

    @property
    def tensor(self) -> str:
        return self.deviation.name if self.deviation else ""


def find_difference(runs: Runs) -> FirstDifference | None:
    """Return the first difference beyond rounding, or None."""
    initial = TensorTriple(
        runs.reference.initial, runs.compared.initial, runs.perturbed.initial, SINGLE_EPSILON
    )
    beyond = first_beyond(initial.deviations())
    if beyond is not None:
        return FirstDifference(0, "initial weight", beyond)
    histories: Histories = defaultdict(NoiseHistory)
    for number in range(1, runs.common_steps + 1):
        difference = compare_step(number, runs.step(number), histories)
        if difference is not None:
            return difference
    if len(runs.reference.steps) != len(runs.compared.steps):
        return FirstDifference(runs.common_steps + 1, "steps")
    return None


def compare_step(number: int, triple: StepTriple, histories: Histories) -> FirstDifference | None:
    reference = triple.reference
    compared = triple.compared
    is_reproducible = samples_agree(reference.samples, triple.perturbed.samples)
    if is_reproducible and not samples_agree(reference.samples, compared.samples):
        return FirstDifference(number, "samples")
    if not rates_agree(reference.rates, compared.rates):
        return FirstDifference(number, "learning rate")
    for quantity, tensors_of in TENSORS.items():
        beyond = first_beyond(histories[quantity].raise_noise(triple.deviations(tensors_of)))
        if beyond is not None:
            is_of_loss = quantity == "gradient" and triple.has_other_loss
            return FirstDifference(number, "loss" if is_of_loss else quantity, beyond)
    return None


def first_beyond(deviations: list[Deviation]) -> Deviation | None:
    return next((entry for entry in deviations if entry.is_beyond_rounding), None)


def samples_agree(first: Samples, second: Samples) -> bool:
    """Return whether two global batches are the same, as far as they are known."""
    if not first.count or not second.count:
        return True
    return first.is_same(second) or not (first.is_identified and second.is_identified)


def rates_agree(first: list[float], second: list[float]) -> bool:
    return all(
        math.isclose(*rates, rel_tol=SAME_RATE) for rates in zip(first, second, strict=False)
    )
