"""How far two tensors may differ by rounding alone, and whether they differ by more.

The reference was run twice, the second time with each activation and gradient changed in its last
place. What that has changed is what another order of sums may change, at the same step and in the
same tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from stepladder.tools.parity.steps import Tensors

# Another order of sums rounds many times, a perturbation once for each value. In half precision
# sums are made in single precision, and so rounded once.
ROUNDING_FACTOR = 30.0
ROUNDING_FACTOR_OF_HALF = 8.0
# Rounding always explains so many units in the last place: of single precision, in which sums are
# made, and of the coarsest value.
ALLOWED_UNITS_OF_SUMS = 64.0
ALLOWED_UNITS = 2.0
SINGLE_EPSILON = 2.0**-23
NOTHING = [0.0]  # a tensor whose norm is 0


@dataclass(frozen=True)
class Deviation:
    """The difference of a tensor, relative to its norm in the reference.

    Args:
        relative: The difference.
        noise: The difference that the perturbation makes.
        epsilon: The rounding unit of the coarsest value.
    """

    name: str
    relative: float
    noise: float
    epsilon: float

    @property
    def allowed(self) -> float:
        """The difference that rounding may make."""
        always_allowed = ALLOWED_UNITS_OF_SUMS * SINGLE_EPSILON + ALLOWED_UNITS * self.epsilon
        is_half = self.epsilon > SINGLE_EPSILON
        factor = ROUNDING_FACTOR_OF_HALF if is_half else ROUNDING_FACTOR
        return factor * self.noise + always_allowed

    @property
    def is_beyond_rounding(self) -> bool:
        return not self.relative <= self.allowed  # true for NaN


class NoiseHistory:
    """The largest noise of each tensor so far.

    Rounding grows from step to step. At one step the noise may happen to be small.
    """

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}

    def raise_noise(self, deviations: list[Deviation]) -> list[Deviation]:
        """Return deviations whose noise is the largest that their tensors have had."""
        raised = []
        for deviation in deviations:
            noise = max(deviation.noise, self.largest.get(deviation.name, 0.0))
            self.largest[deviation.name] = noise
            raised.append(replace(deviation, noise=noise))
        return raised


@dataclass(frozen=True)
class TensorTriple:
    """The same tensors of three runs: the reference, the compared one, and the perturbed one.

    Each tensor is a list: its norm, and then some of its elements.
    """

    reference: Tensors
    compared: Tensors
    perturbed: Tensors
    epsilon: float

    def deviations(self) -> list[Deviation]:
        """Return the deviation of each tensor; one that a run does not have is zero there."""
        names = [*self.reference, *(self.compared.keys() - self.reference.keys())]
        noises = [self.relative(name, self.perturbed) for name in names]
        typical = sum(noises) / max(1, len(noises))
        return [
            Deviation(name, self.relative(name, self.compared), max(noise, typical), self.epsilon)
            for name, noise in zip(names, noises, strict=True)
        ]

    def relative(self, name: str, tensors: Tensors) -> float:
        """Return how far a tensor is from the reference: its elements, or its norm if that is more.

        A tensor that is nothing but rounding errors is measured by the size of the others.
        """
        norm, *values = self.reference.get(name, NOTHING)
        other_norm, *other_values = tensors.get(name, NOTHING)
        size = max(distance(values, []), self.scale * math.sqrt(len(values)))
        if not size or not math.isfinite(size):
            size = 1.0
        element_distance = distance(values, other_values) / size
        norm_distance = abs(gap(norm, other_norm))
        if math.isfinite(norm):
            norm_distance /= max(norm, size)
        if math.isnan(element_distance) or math.isnan(norm_distance):
            return math.inf
        return max(element_distance, norm_distance)

    @cached_property
    def scale(self) -> float:
        """The size of an element, over all tensors."""
        elements = [value for tensor in self.reference.values() for value in tensor[1:]]
        return distance(elements, []) / math.sqrt(max(1, len(elements)))


def distance(first: list[float], second: list[float]) -> float:
    """Return the norm of the difference; a missing element is 0."""
    pairs = zip_longest(first, second, fillvalue=0.0)
    return math.sqrt(sum(gap(*pair) ** 2 for pair in pairs))


def gap(first: float, second: float) -> float:
    """Return the difference of two values; 0 for two equal infinities or two NaNs."""
    is_same = first == second or (math.isnan(first) and math.isnan(second))
    return 0.0 if is_same else first - second
